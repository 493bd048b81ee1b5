"""The sections of the configuration, one class each.

The text below a setting states the effect, the unit and when to change it. Help, the reference page and
editors show it. Fields marked ``IDENTITY`` define the run; all others may change between its launches.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from portable.config.numbers import (
    AdapterRank,
    AdapterScale,
    AverageDecay,
    BatchSize,
    ChunkTokens,
    Dimension,
    Epochs,
    Epsilon,
    Fraction,
    GeneratedTokens,
    Gigabytes,
    GradientNorm,
    LayerNumber,
    LearningRate,
    Length,
    LossScale,
    LossWeight,
    Minutes,
    ModuleSize,
    NoiseScale,
    Parts,
    Processes,
    ProperFraction,
    Ranks,
    Records,
    Samples,
    ScalePower,
    Seconds,
    Steps,
    Threshold,
    Times,
    TokenId,
    VocabularySize,
    Weight,
    WeightDecay,
)
from portable.config.types import (
    IDENTITY,
    AnyCase,
    Columns,
    Flag,
    Names,
    NamesOrPattern,
    OneOrMany,
    OpenMapping,
    OrHubKernel,
    OrPlugIn,
    PathText,
    PlugIn,
    Section,
)

Task = Literal["causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification"]
ScheduleKind = Literal[
    "cosine",
    "linear",
    "constant",
    "wsd",
    "inverse_sqrt",
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
    "OneCycle",
    "LRRangeTest",
]
Attention = Literal[
    "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]
Tracker = Annotated[
    Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "comet_ml", "aim", "clearml", "dvclive"],
    OrPlugIn,
]
Format = Literal[
    "auto", "text", "messages", "sharegpt", "prompt_completion", "alpaca", "preference", "samples"
]
XlaDtype = Literal["float32", "bfloat16"]
Role = Literal["system", "developer", "user", "assistant", "tool", "ipython", "function", "observation"]
SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
ONE, SEVERAL = "[one]", "[several]"
"""What ``data.eval`` may be: pydantic writes it into the places of errors, in brackets as its ``[key]``."""


def _quickstart_model() -> dict[str, Any]:
    """The config of the default model, about four million parameters."""
    return {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }


class ModelConfig(Section):
    """Which model is trained, and from which weights."""

    name_or_path: PathText | None = Field(default=None, json_schema_extra=IDENTITY)
    """Hub id or local folder of a transformers model; training starts from its weights. Null: build
    model.config from scratch."""
    config: OpenMapping | None = Field(default_factory=_quickstart_model, json_schema_extra=IDENTITY)
    """Config of a model to build with random weights: model_type and any keys of its transformers config. A
    file replaces the whole default; a flag such as --model.config.hidden_size 512 changes one key. With
    model.name_or_path: keys to change in that model's config, such as attention_dropout; none that changes
    the shapes of weights."""
    task: Task = Field(default="causal-lm", json_schema_extra=IDENTITY)
    """What the model learns: the next token (causal-lm), masked tokens (masked-lm), a target text
    (seq2seq-lm), or a label (sequence-classification)."""
    init: Literal["pretrained", "scratch"] = Field(default="pretrained", json_schema_extra=IDENTITY)
    """With model.name_or_path: take its weights (pretrained), or only its architecture, with random weights
    (scratch)."""
    function: PlugIn | None = Field(default=None, json_schema_extra=IDENTITY)
    """A function of your own, package.module:name, that gets the model on the meta device and changes it or
    returns another. Importing its module may register model types."""
    attention: Annotated[Attention, OrHubKernel] = "sdpa"
    """Attention kernel: PyTorch's fused one (sdpa), the plain formula (eager; slow), or for CUDA
    flex_attention, flash_attention_2 to 4 (their packages, or the package kernels; bf16 or fp16), or a kernel
    of the hub, kernels-community/flash-attn3."""
    experts: Literal["eager", "batched_mm", "grouped_mm"] | None = None
    """How transformers computes a mixture of experts: one after another (eager), or all in one product
    (batched_mm, grouped_mm). Null: its own choice, grouped_mm where the device has it."""
    trust_remote_code: Flag = False
    """Run Python code from the model's repository. Only for repositories whose code you have read."""

    @property
    def key(self) -> str:
        """The key that describes the model, for error messages."""
        return "model.config" if self.name_or_path is None else "model.name_or_path"

    @property
    def from_scratch(self) -> bool:
        """Whether training starts from random weights."""
        return self.name_or_path is None or self.init == "scratch"


Tokens = Annotated[tuple[TokenId, ...], Field(strict=False, min_length=1)]


class AdapterConfig(Section):
    """An adapter, with peft's names. The model's own weights stay frozen."""

    type: Literal["lora", "ia3"] | None = Field(default=None, json_schema_extra=IDENTITY)
    """Kind of adapter: low-rank matrices beside linear layers (lora), or a factor for each of their outputs
    (ia3). Null: no adapter; all weights are trained."""
    r: AdapterRank = Field(default=16, json_schema_extra=IDENTITY)
    """Rank of the matrices: more can learn more, and need more memory."""
    alpha: AdapterScale = Field(default=32, json_schema_extra=IDENTITY)
    """Scale of what the adapter adds: it is multiplied by alpha / r (with use_rslora by alpha / sqrt(r))."""
    dropout: ProperFraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Share of an adapter's inputs that are zeroed in training."""
    target_modules: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(strict=False)], NamesOrPattern
    ] = Field(default="all-linear", json_schema_extra=IDENTITY)
    """Modules that get an adapter: all-linear (all linear layers except the head), a list of names such as
    [q_proj, v_proj] (empty beside target_parameters), or a regular expression that matches whole module
    names."""
    target_parameters: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Parameters that get an adapter although they are no module of their own, such as the stacked experts of
    a mixture: [mlp.experts.gate_up_proj]. For lora."""
    modules_to_save: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Modules that are trained and saved in full beside the adapter, such as [lm_head]. A classifier's head
    always is."""
    trainable_token_indices: Tokens | dict[str, Tokens] | None = Field(
        default=None, json_schema_extra=IDENTITY
    )
    """Tokens whose rows of the embedding are trained and saved beside the adapter, such as those of
    data.added_tokens: [502, 503], or a list for each table, {embed_tokens: [502], lm_head: [502]}. A tied
    head gets the same rows. For lora."""
    ensure_weight_tying: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """Refuse different trainable_token_indices for tied tables. For lora."""
    layers: Annotated[tuple[LayerNumber, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, json_schema_extra=IDENTITY
    )
    """Numbers of the layers that get an adapter, from 0. Null: all."""
    bias: Literal["none", "all", "lora_only"] = Field(default="none", json_schema_extra=IDENTITY)
    """Biases that are trained as well: all, or those of the modules with an adapter (lora_only). For lora."""
    init: Flag | Literal["gaussian", "orthogonal"] = Field(default=True, json_schema_extra=IDENTITY)
    """Initial values of lora: true as in the paper (training starts at the base model), gaussian or
    orthogonal as in peft; false: both matrices random."""
    use_dora: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """DoRA: train the length of each row of a weight apart from its direction. Slower."""
    use_rslora: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """rsLoRA: scale by alpha / sqrt(r), so that high ranks learn as fast as low ones."""
    base: Literal["auto", "bf16", "fp16", "fp32", "nf4", "int8"] = Field(
        default="auto", json_schema_extra=IDENTITY
    )
    """Dtype of the frozen weights. auto: the compute dtype. fp32 keeps them exact and doubles their memory.
    nf4 (QLoRA: 4 bits, double quantization) and int8 are for linear layers, all except the head; they need
    the package bitsandbytes and FSDP or no_shard."""
    name_or_path: PathText | None = Field(default=None, json_schema_extra=IDENTITY)
    """Folder or hub id of an adapter in peft's format to go on from. Its adapter_config.json decides on all
    of the above except base and dropout."""
    config: PathText | None = None
    """An adapter_config.json, in place of the settings above."""


class SourceConfig(Section):
    """A source of records, and how they are read."""

    # Paths and field names may differ between machines, so they do not define the run. Checkpoints contain a
    # digest of the tokens, which must match.

    source: PathText | Annotated[tuple[PathText, ...], Field(strict=False, min_length=1)] | None = None
    """A hub dataset, a file, glob or list of files (.txt .jsonl .json .csv .parquet), local or by URL, or
    package.module:name, code of your own that gives records. Null: the source code of Python's standard
    library."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What a record that cannot be read does: end the run, or be left out. The first few are printed with
    file and line, and their number."""
    stream: Flag = False
    """Train while the files are read (causal-lm): parts are tokenized ahead of the run, and at most
    data.cache_limit of their tokens is on disk. For data larger than the disk, to begin at once, and for the
    tokens of portable-data. Nothing is held out: set data.eval."""
    config_name: str | None = None
    """Configuration of the hub dataset, or of a local copy of one, if it has several (such as
    wikitext-2-raw-v1)."""
    split: str = Field(default="train", min_length=1)
    """Split to train on: of the hub dataset, where slices such as train[:10%] work, or of a folder whose
    files are named by split."""
    max_samples: Records | None = None
    """Use at most this many records of the source, from its start, to test a config. Null: all."""
    format: Format = "auto"
    """What a record is (causal-lm): a text; a conversation as messages (role and content) or as sharegpt
    (from and value); prompt_completion (strings or messages); alpaca (instruction, input, output); preference
    (prompt, chosen, rejected, for a loss of pairs); samples (finished ones, from code of your own). auto: by
    the first record's columns."""
    train_on: Literal["assistant", "completion", "last_assistant", "all"] | None = None
    """Tokens of a conversation that the loss counts: all that the assistant says (assistant), its last
    message (last_assistant), what follows the prompt (completion), or all. Null: completion if the record has
    a prompt (prompt_completion, alpaca), else assistant."""
    roles_to_train: Annotated[tuple[Role, ...], OneOrMany, Field(strict=False, min_length=1)] | None = None
    """Roles whose messages the loss counts, to the end of their turn. Null: the assistant's, as data.train_on
    has it."""
    split_turns: Flag = False
    """Make each of the assistant's messages a sample, with the conversation before it. Done by itself where
    the template shows earlier turns otherwise than the last one, such as without their thinking."""
    text_field: str = Field(default="text", min_length=1)
    """Field of a record with its text. A dot selects a nested field: translation.en. The same applies to the
    fields below."""
    text_pair_field: str | None = Field(default=None, min_length=1)
    """Field with the second text of a pair (sequence-classification), such as the hypothesis for a premise.
    Both are truncated together to data.seq_len, the longer first."""
    target_field: str = Field(default="target", min_length=1)
    """Field with the target text (seq2seq-lm)."""
    source_prefix: str = ""
    """Prefix of every text, such as 'summarize: ' for T5 (seq2seq-lm)."""
    label_field: str = Field(default="label", min_length=1)
    """Field with the label (sequence-classification): a class (an integer or a string), a list of classes, or
    for a regression numbers with a fraction."""
    columns: Columns = ()
    """Fields of a record that have other names, such as {prompt: question, completion: answer} or {messages:
    chat.turns}: the name that data.format expects, and the field. Other names are further columns of numbers
    that reach train.loss in the batch (without packing), such as {weight: score}; a list, such as [weight,
    score], has only these."""
    text_split: Literal["file", "paragraph", "line"] = "file"
    """Unit of text in a .txt file: the whole file, a paragraph (separated by blank lines), or a line. Matters
    without packing, where each text is truncated to data.seq_len."""


def _named(name: str) -> str:
    if SOURCE_NAME.fullmatch(name) is None:
        raise ValueError(f"may only have letters, digits, - and _, got {name[:60]!r}; rename the source")
    return name


SourceName = Annotated[str, AfterValidator(_named)]


class MixedSource(SourceConfig):
    """A source of a mixture."""

    name: SourceName
    """Of the source, in logs and files."""
    weight: Weight | None = None
    """Its share of the samples, beside the others'."""
    epochs: Epochs | None = None
    """Its passes in one pass over the mixture, in place of a weight."""


class Phase(Section):
    """Weights of a mixture from a step on."""

    step: Steps
    """The first step that has these weights."""
    weights: dict[str, Weight]
    """By the name of the source."""


def _one_or_several(value: Any) -> str:
    several = isinstance(value, dict) and value and not value.keys() & SourceConfig.model_fields.keys()
    return SEVERAL if several and all(isinstance(one, dict | SourceConfig) for one in value.values()) else ONE


EvaluationSources = Annotated[
    Annotated[SourceConfig, Tag(ONE)] | Annotated[dict[SourceName, SourceConfig], Tag(SEVERAL)],
    Discriminator(_one_or_several),
]


class DataConfig(SourceConfig):
    """What is trained on: source, format, tokens, packing."""

    sources: Annotated[tuple[MixedSource, ...], Field(strict=False)] = ()
    """A mixture, in place of data.source, such as [{name: web, source: web/*.jsonl, weight: 3}, {name: code,
    source: code.jsonl, weight: 1}]. Each may set what is marked ‡. weight is its share of the samples, kept
    in every few hundred; or give every source epochs, its passes in one pass over the mixture (default: 1
    each)."""
    weight_schedule: Annotated[tuple[Phase, ...], Field(strict=False)] = ()
    """Weights of data.sources that change, such as [{step: 9000, weights: {web: 1, code: 4}}]: from that step
    on they replace all weights before."""
    shuffle_window: Parts = Field(default=1, json_schema_extra=IDENTITY)
    """Parts of a stream whose samples are mixed at a time. More shuffles better; the run begins once as many
    are tokenized."""
    cache_limit: Gigabytes | None = None
    """Gigabytes of a stream's tokens that stay on disk; what is needed again is made again. Null: half of the
    space that is free at the start."""
    chat_template: PathText | None = None
    """Template that turns a conversation into text: a file (.jinja), the name of one of the tokenizer's
    templates, or chatml. Null: the tokenizer's own. It is saved with the tokenizer."""
    chat_template_kwargs: OpenMapping = Field(default_factory=dict)
    """Further variables of the template, such as enable_thinking: false. strftime_now is the date that a
    template writes as today's: 2025-01-01 by default, so that tokens are always the same."""
    truncation: Literal["end", "start", "drop", "error"] = Field(default="end", json_schema_extra=IDENTITY)
    """What happens to a text or conversation longer than data.seq_len, if not packed: it is cut at its end or
    start, left out (drop), or ends the run (error). A conversation of which no trained token remains is left
    out. The counts are printed."""
    source_language: str | None = Field(default=None, min_length=1)
    """Language of the texts, as a code of a multilingual tokenizer (eng_Latn for NLLB, en_XX for mBART, en
    for M2M100). For seq2seq-lm."""
    target_language: str | None = Field(default=None, min_length=1)
    """Language of the targets, likewise. The saved model then generates in this language."""
    tokenizer: PathText | None = None
    """Hub id or folder of a tokenizer. Null: the tokenizer of model.name_or_path, or, for a model built from
    scratch, a small byte-pair encoding trained on the source, once, and cached."""
    added_tokens: Names = Field(default=(), json_schema_extra=IDENTITY)
    """Special tokens to add to the tokenizer, such as those of a chat template. The model's vocabulary grows
    where it has to; new rows are drawn around the mean of the others, as in transformers."""
    vocab_size: VocabularySize | None = None
    """Tokens in the byte-pair encoding that is trained without a tokenizer. Null: the model's vocab_size."""
    seq_len: Length = Field(default=256, ge=2, json_schema_extra=IDENTITY)
    """Length of a training sequence in tokens. Memory for activations grows with it."""
    target_seq_len: Length | None = Field(default=None, ge=2, json_schema_extra=IDENTITY)
    """Length of a target text in tokens (seq2seq-lm). Null: data.seq_len."""
    packing: Flag | Annotated[Literal["documents"], AnyCase] = Field(default=True, json_schema_extra=IDENTITY)
    """True: concatenate texts into full sequences (language models only). documents, the default for
    conversations: pack whole texts, which do not see each other (causal-lm only). False, always so in
    seq2seq-lm and sequence-classification: one text per sequence, truncated or padded to data.seq_len."""
    eval_fraction: ProperFraction | None = Field(default=None, json_schema_extra=IDENTITY)
    """Share of the training data held out for evaluation: the end of the concatenated text, or a fixed choice
    of records if texts are not concatenated. Null: 0.01, but at least 16 sequences or records, and at most a
    fifth of the data. 0, the default with data.eval: none."""
    eval: EvaluationSources | None = None
    """Data to evaluate on: a source, as in {source: test.jsonl} or {split: validation}, or several by name,
    as in {news: {source: news.jsonl}, code: {source: code.jsonl}}. Each may set what is marked ‡; the rest is
    as for training. Null: the share that data.eval_fraction holds out."""
    num_workers: Processes = 0
    """Processes that prepare batches for each rank; 0: the rank itself does. Raise it if the accelerator
    waits for data. As many, at least one, tokenize a stream on each machine."""
    cache_dir: PathText | None = None
    """Folder that caches tokenized data and trained tokenizers. Null: the user's cache folder
    ($XDG_CACHE_HOME, or ~/.cache)."""

    @property
    def sequences(self) -> int:
        """Sequences of a sample: a preference has two."""
        return 2 if self.format == "preference" else 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, including targets."""
        return max(self.seq_len, self.target_seq_len or 0)


class ParameterGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    pattern: str = Field(min_length=1)
    learning_rate: LearningRate | None = None
    weight_decay: WeightDecay | None = None


class TrainConfig(Section):
    """Length, batch sizes, optimizer and schedule."""

    steps: Steps | None = Field(default=200, ge=1, json_schema_extra=IDENTITY)
    """Length of the schedule in optimizer steps. Null only if train.epochs is set."""
    epochs: Epochs | None = Field(default=None, json_schema_extra=IDENTITY)
    """Length of the schedule in passes over the data, instead of train.steps."""
    stop_after: Steps | None = Field(default=None, ge=1)
    """Save a checkpoint and stop after this step. The same command without it resumes from there, possibly on
    another machine."""
    global_batch_size: BatchSize = Field(default=8, json_schema_extra=IDENTITY)
    """Sequences per optimizer step, over all ranks, whatever their number."""
    micro_batch_size: BatchSize | Literal["auto"] = 4
    """Sequences per device and forward pass; gradients accumulate up to the global batch. Lower it if memory
    runs out: only the speed changes. auto: the largest that fits, found by trial; on a CPU without a memory
    limit (ulimit -v) at most 4; not on XLA. The default is lowered to a divisor of the global batch."""
    loss: PlugIn | None = Field(default=None, json_schema_extra=IDENTITY)
    """dpo, ipo, simpo or orpo (data.format preference), or a loss of your own: package.module:name; arguments
    as in dpo(beta=0.2). Null: cross-entropy, or the loss of a classifier's problem_type."""
    label_smoothing: ProperFraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Share of each target that is spread evenly over all tokens or classes. The loss of an evaluation stays
    the plain one."""
    z_loss: LossWeight = Field(default=0.0, json_schema_extra=IDENTITY)
    """Weight of the squared logarithm of the softmax's normalizer, which keeps logits from drifting; 1e-4 is
    common for pretraining. Not part of the loss of an evaluation."""
    neftune_noise_alpha: NoiseScale = Field(default=0.0, json_schema_extra=IDENTITY)
    """Size of the noise that is added to embeddings in training (NEFTune), by the length of each document; 5
    is common for fine-tuning on conversations."""
    dropout: Flag | None = Field(default=None, json_schema_extra=IDENTITY)
    """Whether dropout, a LoRA's too, is on in training. Null: off with the losses of pairs, as in TRL, and on
    otherwise."""
    optimizer: Annotated[Literal["adamw", "adafactor", "adamw_8bit", "sgd", "muon"], OrPlugIn] = Field(
        default="adamw", json_schema_extra=IDENTITY
    )
    """adamw (fused; two fp32 moments), adafactor (factored moments, little memory), adamw_8bit (8-bit
    moments; 32 bits for embeddings, vectors and small matrices), sgd (momentum is the first of train.betas),
    muon (orthogonalized momentum for the matrices of layers, adamw for the rest), or package.module:name, any
    torch.optim.Optimizer such as torch.optim:NAdam(momentum_decay=0.004)."""
    muon_momentum: ProperFraction = Field(default=0.95, json_schema_extra=IDENTITY)
    """Momentum of muon's matrices (Nesterov's)."""
    muon_rate: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw", json_schema_extra=IDENTITY
    )
    """How muon adjusts the learning rate to a matrix of R rows and C columns, as torch's adjust_lr_fn.
    match_rms_adamw: times 0.2 sqrt(max(R, C)), so that rates for adamw fit. original: times sqrt(max(1, R /
    C))."""
    adafactor_rule: Literal["torch", "transformers"] = Field(default="torch", json_schema_extra=IDENTITY)
    """Which library's update rule adafactor uses. torch: the rate is relative to a parameter's RMS, and at
    most one over the square root of the steps. transformers: the rate is absolute, as in the Trainer
    (scale_parameter and relative_step false); use one 10 to 100 times lower."""
    betas: Annotated[tuple[ProperFraction, ProperFraction], Field(strict=False)] = Field(
        default=(0.9, 0.95), json_schema_extra=IDENTITY
    )
    """Decay rates of the first and second moment. Raise the second towards 0.999 for small or noisy
    batches."""
    eps: Epsilon = Field(default=1e-8, json_schema_extra=IDENTITY)
    """Added to the root of the second moment to avoid division by zero. Smaller numbers are zero in fp32."""
    ema: AverageDecay | None = Field(default=None, json_schema_extra=IDENTITY)
    """Average the weights over the steps, in fp32: the share of the average that stays in each, such as
    0.999. It is in checkpoints; checkpoint.export_ema exports it."""
    trainable: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Train only the parameters in whose names one of these regular expressions is found: lm_head, or
    layers\\.(30|31)\\. for two layers. All others are frozen: no gradient, no optimizer state, bit for bit as
    they are. Null: all."""
    frozen: Names = Field(default=(), json_schema_extra=IDENTITY)
    """Freeze the parameters in whose names one of these regular expressions is found, such as embed_tokens;
    also those of train.trainable."""
    learning_rate: LearningRate = Field(default=3e-4, json_schema_extra=IDENTITY)
    """Highest learning rate, reached at the end of the warmup."""
    min_learning_rate_ratio: Fraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Final rate of cosine, linear and wsd, and lowest of inverse_sqrt, as a share of train.learning_rate."""
    schedule: Annotated[ScheduleKind, OrPlugIn] = Field(default="cosine", json_schema_extra=IDENTITY)
    """Decay of the learning rate after the warmup; wsd (warmup-stable-decay) keeps the rate until the last
    part of the run. Capitalized names are DeepSpeed's schedulers, on any backend (OneCycle and LRRangeTest
    under ZeRO). Or package.module:name, a function or class of your own."""
    schedule_params: OpenMapping = Field(default_factory=dict, json_schema_extra=IDENTITY)
    """More parameters of a schedule. wsd: decay_ratio (0.2 of all steps), decay_type and warmup_type (linear,
    cosine or 1-sqrt). inverse_sqrt: timescale (the steps of the warmup). DeepSpeed's have its names;
    train.learning_rate is the peak of OneCycle and the first rate of LRRangeTest."""
    warmup_steps: Steps | None = Field(default=None, json_schema_extra=IDENTITY)
    """Steps over which the learning rate rises from zero, linearly unless the schedule defines another shape.
    Null: train.warmup_ratio is used."""
    warmup_ratio: Fraction | None = Field(default=None, json_schema_extra=IDENTITY)
    """The warmup as a share of all steps, rounded up, instead of train.warmup_steps."""
    weight_decay: WeightDecay = Field(default=0.1, json_schema_extra=IDENTITY)
    """Weight decay of all parameters except biases and norms, as in the Trainer. Decoupled for adamw and
    muon, added to the gradient for sgd."""
    parameter_groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = Field(
        default=(), json_schema_extra=IDENTITY
    )
    """Parameters with values of their own, as in [{pattern: lora_B, learning_rate: 5.0e-3}, {pattern:
    embed_tokens, weight_decay: 0}]. pattern is a regular expression, searched in names; the first match
    counts. learning_rate follows the schedule in proportion. weight_decay spares biases and norms as well."""
    max_grad_norm: GradientNorm | None = Field(default=1.0, json_schema_extra=IDENTITY)
    """Gradients whose global norm exceeds this are scaled down to it. Null: no clipping."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does. Its update is always skipped: weights and optimizer
    stay bit for bit. stop: the run ends and reports the step, its samples and how to find the cause
    (--replay). skip: the run continues, counts skipped_steps, and ends after ten in a row. Overflows under
    fp16 only adjust the loss scale."""
    eval_every: Times | None = 100
    """Steps between evaluations on the held-out records. Null: only at the end."""
    eval_every_epochs: Epochs | None = None
    """Passes over the data between evaluations, instead of train.eval_every: 0.5 evaluates in the middle and
    after the last step of each epoch."""
    eval_batches: Times | None = None
    """Evaluate on at most this many global batches. Null: on all held-out records."""
    eval_ema: Flag = False
    """Evaluate the average of the weights (train.ema) in their place."""
    metrics: Annotated[tuple[str, ...], OneOrMany, Field(strict=False)] | None = None
    """What an evaluation computes besides the loss: perplexity and accuracy (of tokens); of a classifier
    accuracy, f1 and confusion; of a regression mse, mae and r2; of generated texts exact_match and rouge_l
    (seq2seq-lm); or package.module:name, a function or class of your own. Null: all of the task that generate
    nothing, or none with train.loss; []: the loss alone."""
    callbacks: Annotated[tuple[PlugIn, ...], OneOrMany, Field(strict=False)] = ()
    """Callbacks of your own, as package.module:name or package.module:name(argument=value), called at the
    start, after steps, logs, evaluations and saves, and at the end."""
    early_stopping_patience: Times | None = None
    """End the run after this many evaluations in a row without an improvement of checkpoint.best_metric.
    Null: never."""
    early_stopping_threshold: Threshold = 0.0
    """An improvement is larger than this, measured from the best evaluation so far."""

    @property
    def freezes(self) -> bool:
        """Whether some parameters are frozen by pattern."""
        return self.trainable is not None or bool(self.frozen)


class MemoryConfig(Section):
    """Trade speed for memory. None of these changes the result."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in the backward pass instead of storing them: of every layer (full; about a third
    slower, least memory), or all except those of costly operations (selective)."""
    loss_chunk_tokens: ChunkTokens | Literal["auto"] = "auto"
    """Tokens whose logits are in memory at a time: the loss of a larger micro-batch is computed in chunks,
    and again in the backward pass. auto: as many as have 64 million logits (256 MiB), which matters for large
    vocabularies. 0: all at once. FSDP and DDP only."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Keep and update optimizer state in host memory (cpu) or on a local disk (nvme): slower."""
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """Keep sharded parameters in host memory (cpu) or on a local disk (nvme) between uses; with FSDP also the
    optimizer's state and step. The slowest option."""
    nvme_path: PathText | None = None
    """Folder on a fast local disk for offloading to nvme."""

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded from the devices."""
        return (self.offload_optimizer, self.offload_params) != ("none", "none")


class FsdpConfig(Section):
    """Details of FSDP, with Accelerate's names. Null: the backend's default."""

    shard_group_size: Ranks | None = None
    """Ranks (on XLA: devices) that shard one replica of the state in hybrid_shard and hybrid_shard_zero2.
    Null: the ranks of one node (on XLA: the devices of one slice)."""
    auto_wrap_policy: (
        Annotated[Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"], AnyCase] | None
    ) = None
    """Units of sharding: each transformer layer, each module of at least fsdp.min_num_params parameters, or
    the whole model. Null: each transformer layer."""
    transformer_layer_cls_to_wrap: Names | None = None
    """Class names of the layers that transformer_based_wrap wraps. Null: those that the model declares."""
    min_num_params: ModuleSize | None = None
    """Smallest module, in parameters, that size_based_wrap wraps."""
    forward_prefetch: Flag | None = None
    """Gather the next unit's parameters during the current unit's forward pass: more overlap, more memory."""
    backward_prefetch: Annotated[Literal["backward_pre", "backward_post", "no_prefetch"], AnyCase] | None = (
        None
    )
    """When the backward pass gathers the next unit: before this unit's gradients (backward_pre, most overlap;
    the default), or after them (backward_post and no_prefetch, the same in FSDP2: less memory)."""


class Fp16Config(Section):
    """Dynamic loss scaling of precision fp16. The names are DeepSpeed's."""

    initial_scale_power: ScalePower = 16
    """The initial scale is 2 to this power. Lower it to skip fewer updates at the start."""
    loss_scale_window: Times = 1000
    """Updates without an overflow after which the scale is doubled."""
    hysteresis: Times = 2
    """Overflows since the last doubling until the scale is halved. 1: every overflow halves it."""
    min_loss_scale: LossScale = 1.0
    """Minimum scale. The run ends if gradients overflow at this scale."""


class DeepSpeedConfig(Section):
    """DeepSpeed's settings, for zero1, zero2 and zero3."""

    config: PathText | OpenMapping | None = None
    """A DeepSpeed JSON file, or its content as a mapping. Its auto values are filled in from this config. The
    JSON overrides defaults of this config; a setting that differs from the JSON is an error."""


class XlaConfig(Section):
    """Details of XLA. Null: the backend's default."""

    buffer_dtype: XlaDtype | None = None
    """Dtype of buffers in the computation."""
    shard_param_on_dim_0: Flag | None = None
    """Shard each parameter along its first dim, also if another is longer."""
    optimization_barrier_in_backward: Flag | None = None
    """Keep the compiler from merging the gathers of different units in the backward pass."""
    sharding: dict[str, Dimension | None] | None = None
    """The sharded dim of parameters, to override the default: a mapping from regular expressions, searched in
    parameter names, to a dim, or null to replicate. The first match counts."""
    scan_layers: Flag = False
    """Compile layers that are alike once and run them in a loop, so that compile time does not grow with
    depth."""
    attention_rows: Length | None = None
    """Compute attention for this many tokens of a sequence at a time: its scores take memory for these rows
    alone, and are computed again in the backward pass. Null: all at once."""
    compilation_cache: PathText = "auto"
    """Folder that caches compiled graphs, or none. auto: on a TPU a folder in the user's cache; none on
    virtual devices, whose graphs cannot be cached."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    every_steps: Times | None = 100
    """Steps between checkpoints. Null: only when the run stops."""
    every_epochs: Epochs | None = None
    """Passes over the data between checkpoints, instead of checkpoint.every_steps."""
    keep: Times | None = 3
    """Newest checkpoints to keep; older ones are deleted. Null: all."""
    keep_best: Times | None = None
    """Keep this many of the best checkpoints by checkpoint.best_metric, besides the newest; an evaluation
    among the best saves one. Null: the newest alone."""
    best_metric: str | None = Field(default=None, min_length=1)
    """The value to compare, by its name in metrics.jsonl: eval_accuracy, or eval_loss/news for the source
    news. Null: eval_loss, of the first source."""
    best_mode: Literal["auto", "min", "max"] = "auto"
    """Which value is better. auto: as the metric has it; a metric of your own may have higher_is_better."""
    export_best: Flag = False
    """Write <output_dir>/final from the best checkpoint, not the last."""
    export_ema: Flag = False
    """Write <output_dir>/final from the average of the weights (train.ema)."""
    async_: Flag = Field(default=True, alias="async")
    """Write in the background, from a copy of the state in host memory. False: wait for the disk, without a
    copy."""
    resume: PathText = "auto"
    """auto: resume from the newest complete checkpoint in output_dir, if there is one. never: refuse a folder
    with checkpoints. Or, while output_dir has none, the path or URL of a checkpoint to start from, this
    program's or another's (docs/moving.md)."""
    allow_changes: Flag = False
    """Continue the run in output_dir although settings of the optimizer or the schedule have changed, such as
    train.learning_rate. More train.steps or train.epochs need no permission."""
    resume_step: Steps | None = None
    """Optimizer steps that count as done at another program's checkpoint in checkpoint.resume. The schedule
    continues from there; 0 restarts it. Null: the checkpoint's own count."""
    resume_samples: Samples | None = None
    """Sequences that count as consumed there. This run's data order continues from there. Null: the
    checkpoint's own count, or its steps times train.global_batch_size."""
    staging_dir: PathText | None = None
    """If output_dir is a URL: a local folder for shards before their upload, with space for this machine's
    share of one checkpoint. Null: in the system's temporary folder."""
    max_outage_minutes: Minutes = 60.0
    """If output_dir is a URL: for how many minutes saves may fail because the store is away. The steps go on
    meanwhile, and each save tries again."""
    export: Flag | Literal["merged", "like_base"] = True
    """At the end, write safetensors into <output_dir>/final for from_pretrained: the model, or the adapter
    alone, in peft's format. merged: the model with the adapter merged into it. like_base: quantized as
    model.name_or_path is, also with an adapter merged into it."""

    @property
    def saves_on_the_way(self) -> bool:
        """Whether checkpoints are written during training."""
        return self.every_steps is not None or self.every_epochs is not None


class LogConfig(Section):
    """Reports during the run."""

    every_steps: Times = 10
    """Steps between lines in metrics.jsonl and on the console. Each is a host sync."""
    hang_timeout: Seconds | None = 480.0
    """Seconds without a new batch after which every rank writes its stacks to <output_dir>/hang/ and exits;
    the first batch may take four times as long. Null: no limit."""
    memory_snapshot: Flag = False
    """Record GPU memory allocations, and write them to <output_dir>/memory/ if memory runs out, for
    https://pytorch.org/memory_viz. Costs a few percent of speed. GPUs only."""
    trackers: Annotated[tuple[Tracker, ...], OneOrMany, Field(strict=False)] = ("tensorboard",)
    """Trackers for the metrics, besides metrics.jsonl; [] for none. All except tensorboard need their own
    package. Or package.module:name, a class with the methods of accelerate.tracking.GeneralTracker."""
    project: str | None = Field(default=None, min_length=1)
    """Project of the run at the trackers. Null: WANDB_PROJECT (or the other's variable), else the name of the
    folder that output_dir lies in."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run there. Null: the last part of output_dir. All launches of a run are one run there."""
    sample_prompt: str | None = Field(default=None, min_length=1)
    """Text that the model continues at the end of the run (generative models). Null: the start of a held-out
    text."""
    sample_tokens: GeneratedTokens = 64
    """Tokens to generate in that sample. 0: no sample."""
    quiet: Flag = False
    """Print warnings and errors only (--quiet); log.txt in the run's folder has the rest."""


class HubConfig(Section):
    """Uploads of exports to the Hugging Face hub."""

    push: Literal["end", "checkpoints"] | None = None
    """What to upload: <output_dir>/final at the end, with a model card (end), or also the export of every
    checkpoint, each as a commit (checkpoints). Null: nothing. Optimizer states and data stay here. The token
    comes from HF_TOKEN or hf auth login."""
    repo: str | None = Field(default=None, min_length=1)
    """Repository, such as organization/name. It is created if there is none. Null: the last part of
    output_dir, under the name of the token's user."""
    private: Flag = True
    """Create a private repository, and refuse one that is public. False: create a public one; an existing one
    stays as it is."""
