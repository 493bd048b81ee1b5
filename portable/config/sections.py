"""The sections of the configuration, each with its own class.

The docstring below a setting describes its effect, its unit and when to change it. The help, the
reference page and editors show it. Settings marked with ``IDENTITY`` define the run. All others may
change between the launches of a run.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from portable.config.field_types import (
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
from portable.config.number_types import (
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
    Interval,
    LayerNumber,
    LearningRate,
    Length,
    LossScale,
    LossWeight,
    Minutes,
    ModuleSize,
    NoiseScale,
    PartCount,
    Pixels,
    Processes,
    ProperFraction,
    Ranks,
    Records,
    Samples,
    ScalePower,
    Seconds,
    Steps,
    Threshold,
    TokenId,
    VocabularySize,
    Weight,
    WeightDecay,
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
SOURCE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""Regular expression of the names of sources."""
SINGLE_EVAL_TAG, NAMED_EVAL_TAG = "[one]", "[several]"
"""Tags of the two forms of ``data.eval`` in pydantic's error paths: one source, or several named sources.

They have brackets like pydantic's ``[key]``, so that they differ from all names of sources."""


def _build_quickstart_model() -> dict[str, Any]:
    """Return the default of ``model.config``: a Llama with about four million parameters."""
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
    """The model, and the weights from which training starts."""

    name_or_path: PathText | None = Field(default=None, json_schema_extra=IDENTITY)
    """Hub id or local folder of a transformers model. Training starts from its weights. Null: build the model
    in model.config with random weights."""
    config: OpenMapping | None = Field(default_factory=_build_quickstart_model, json_schema_extra=IDENTITY)
    """Config of a model to build with random weights: model_type and any keys of the transformers config. In
    a file, it replaces the complete default; a flag such as --model.config.hidden_size 512 changes one key.
    With model.name_or_path: keys to change in the config of that model, such as attention_dropout. Keys that
    determine the shapes of weights cannot change."""
    task: Task = Field(default="causal-lm", json_schema_extra=IDENTITY)
    """Training task: predict the next token (causal-lm), masked tokens (masked-lm), a target text
    (seq2seq-lm), or a label (sequence-classification)."""
    init: Literal["pretrained", "scratch"] = Field(default="pretrained", json_schema_extra=IDENTITY)
    """Whether a model in model.name_or_path starts from its weights (pretrained), or only its architecture is
    used, with random weights (scratch)."""
    function: PlugIn | None = Field(default=None, json_schema_extra=IDENTITY)
    """A custom function, written package.module:name. It gets the model on the meta device, and changes it or
    returns another model. Importing its module may register model types."""
    attention: Annotated[Attention, OrHubKernel] = "sdpa"
    """Attention kernel. sdpa is PyTorch's fused kernel. eager computes the plain formula and is slow. CUDA
    also supports flex_attention, flash_attention_2 to flash_attention_4, and kernels on the Hub such as
    kernels-community/flash-attn3. The flash_attention kernels need bf16 or fp16, and either their own
    package or the package kernels."""
    experts: Literal["eager", "batched_mm", "grouped_mm"] | None = None
    """Kernel for the expert layers of a mixture-of-experts model: one expert after another (eager), or
    in one matrix product (batched_mm, grouped_mm). Null: transformers chooses, which is grouped_mm if the
    device supports it."""
    trust_remote_code: Flag = False
    """Run Python code from the repository of the model. Set it only for repositories whose code you have
    read."""

    @property
    def setting_key(self) -> str:
        """Key of the setting that defines the model, used in error messages."""
        return "model.config" if self.name_or_path is None else "model.name_or_path"

    @property
    def from_scratch(self) -> bool:
        """Whether training starts from random weights."""
        return self.name_or_path is None or self.init == "scratch"


Tokens = Annotated[tuple[TokenId, ...], Field(strict=False, min_length=1)]


class AdapterConfig(Section):
    """An adapter, with settings named as in peft. The weights of the model stay frozen."""

    type: Literal["lora", "ia3"] | None = Field(default=None, json_schema_extra=IDENTITY)
    """Kind of adapter: low-rank matrices that are added to linear layers (lora), or a factor for each output
    of a layer (ia3). Null: no adapter; all weights are trained."""
    r: AdapterRank = Field(default=16, json_schema_extra=IDENTITY)
    """Rank of the low-rank matrices. A higher rank can learn more and needs more memory."""
    alpha: AdapterScale = Field(default=32, json_schema_extra=IDENTITY)
    """Scale of the adapter's output, which is multiplied by alpha / r, or by alpha / sqrt(r) with
    adapter.use_rslora."""
    dropout: ProperFraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Share of the adapter's inputs that are set to zero in training."""
    target_modules: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(strict=False)], NamesOrPattern
    ] = Field(default="all-linear", json_schema_extra=IDENTITY)
    """Modules that get an adapter: all-linear for all linear layers except the head, a list of names such as
    [q_proj, v_proj], or a regular expression that matches complete module names. The list may be empty if
    adapter.target_parameters is set."""
    target_parameters: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Parameters that get an adapter although they are not modules, such as the stacked weights of experts:
    [mlp.experts.gate_up_proj]. Only for lora."""
    modules_to_save: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Modules that are trained and saved in full in addition to the adapter, such as [lm_head]. The head of a
    classifier is always included."""
    trainable_token_indices: Tokens | dict[str, Tokens] | None = Field(
        default=None, json_schema_extra=IDENTITY
    )
    """IDs of tokens whose rows of the embedding are trained and saved with the adapter, such as the tokens in
    data.added_tokens: [502, 503], or a list for each table, {embed_tokens: [502], lm_head: [502]}. A tied
    head gets the same rows. Only for lora."""
    ensure_weight_tying: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """Raise an error if trainable_token_indices differ between embedding tables whose weights are tied. Only
    for lora."""
    layers: Annotated[tuple[LayerNumber, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, json_schema_extra=IDENTITY
    )
    """Numbers of the layers that get an adapter, starting at 0. Null: all layers."""
    bias: Literal["none", "all", "lora_only"] = Field(default="none", json_schema_extra=IDENTITY)
    """Biases that are trained in addition to the adapter: none, all biases of the model, or only the biases
    of modules with an adapter (lora_only). Only for lora."""
    init: Flag | Literal["gaussian", "orthogonal"] = Field(default=True, json_schema_extra=IDENTITY)
    """Initial values of lora. true follows the paper, so that training starts exactly at the base model;
    gaussian and orthogonal are as in peft; false makes both matrices random."""
    use_dora: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """Use DoRA, which trains the length of each weight row separately from its direction. Slower."""
    use_rslora: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """Use rsLoRA, which scales by alpha / sqrt(r), so that high ranks learn as fast as low ranks."""
    base: Literal["auto", "bf16", "fp16", "fp32", "nf4", "int8"] = Field(
        default="auto", json_schema_extra=IDENTITY
    )
    """Dtype of the frozen weights. auto is the dtype of the computation. fp32 keeps the weights exact and
    doubles their memory. nf4 (QLoRA: 4 bits with double quantization) and int8 quantize all linear layers
    except the head; they need the package bitsandbytes, and FSDP or no_shard."""
    name_or_path: PathText | None = Field(default=None, json_schema_extra=IDENTITY)
    """Folder or hub id of an adapter in peft's format from which training continues. Its adapter_config.json
    determines all settings above except base and dropout."""
    config: PathText | None = None
    """File adapter_config.json that replaces the settings above."""


class SourceConfig(Section):
    """A source of records, and settings for reading them."""

    # Paths and field names may differ between machines, so they do not define the run. Checkpoints contain a
    # digest of the tokens, which must match.

    source: PathText | Annotated[tuple[PathText, ...], Field(strict=False, min_length=1)] | None = None
    """A hub dataset, a file, a glob or a list of files (.txt .jsonl .json .csv .parquet), local or by URL, or
    custom code that yields records, written package.module:name. Null: the source code of Python's standard
    library."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Whether a record that cannot be read ends the run (error) or is left out (skip). The first such records
    are printed with file and line, and all are counted."""
    stream: Flag = False
    """Train while the files are read (causal-lm). The data is tokenized shortly before it is needed, and at
    most data.cache_limit gigabytes of tokens are kept on disk. Use it if the data is larger than the disk,
    if training should start immediately, or for tokens written by portable-data. A stream holds no data out
    for evaluation: set data.eval."""
    config_name: str | None = None
    """Configuration of a hub dataset, or of a local copy of a hub dataset, that has several, such as
    wikitext-2-raw-v1."""
    split: str = Field(default="train", min_length=1)
    """Split to train on. For a hub dataset, slices such as train[:10%] work as well. In a folder, the names
    of the files give the split."""
    max_samples: Records | None = None
    """Use at most this many records from the start of the source, for example to try a config. Null: all
    records."""
    format: Format = "auto"
    """Format of the records (causal-lm): a text; a conversation as messages (role and content) or as sharegpt
    (from and value); prompt_completion (strings or messages); alpaca (instruction, input, output); preference
    (prompt, chosen, rejected, for a loss on pairs); or samples, which custom code has already tokenized. auto
    detects the format from the first record."""
    train_on: Literal["assistant", "completion", "last_assistant", "all"] | None = None
    """Tokens of a conversation that count in the loss: everything that the assistant writes (assistant), its
    last message (last_assistant), what follows the prompt (completion), or all. Null: completion for records
    with a prompt (prompt_completion, alpaca), otherwise assistant."""
    roles_to_train: Annotated[tuple[Role, ...], OneOrMany, Field(strict=False, min_length=1)] | None = None
    """Roles whose messages count in the loss, including the end of the turn. Null: only the assistant, as
    data.train_on determines."""
    split_turns: Flag = False
    """Make a separate sample of each message of the assistant, with the conversation before it. This always
    happens if the chat template renders earlier turns differently from the last turn, for example without
    their thinking."""
    image_root: PathText | None = None
    """Folder of the images that conversations name by a path. An image outside of it is a bad record. Null:
    the folder of data.source."""
    image_urls: Flag | Annotated[Literal["private"], AnyCase] = False
    """Download the images that conversations name by a URL. Otherwise, they are bad records. private: also
    from servers with a private address, such as a server in your network. Only do this for trusted data."""
    text_field: str = Field(default="text", min_length=1)
    """Field of a record with the text. A dot selects a nested field, such as translation.en; the same is true
    for the fields below."""
    text_pair_field: str | None = Field(default=None, min_length=1)
    """Field with the second text of a pair (sequence-classification), such as the hypothesis that belongs to
    a premise. If the pair is longer than data.seq_len, the longer text is truncated first."""
    target_field: str = Field(default="target", min_length=1)
    """Field with the target text (seq2seq-lm)."""
    source_prefix: str = ""
    """Text that is added in front of every input, such as 'summarize: ' for T5 (seq2seq-lm)."""
    label_field: str = Field(default="label", min_length=1)
    """Field with the label (sequence-classification): a class as an integer or a string, a list of classes,
    or numbers with a fraction for a regression."""
    columns: Columns = ()
    """Names of fields that differ from the names that data.format expects, as {expected name: name in the
    record}, such as {prompt: question, completion: answer} or {messages: chat.turns}. Any other key adds a
    column of numbers to the batch, which train.loss can read, such as {weight: score}. This requires
    packing: false. A list such as [weight, score] adds columns under their own names."""
    text_split: Literal["file", "paragraph", "line"] = "file"
    """Unit of text in a .txt file: the file, a paragraph (separated by blank lines), or a line. The
    unit matters without packing, because each text is then truncated to data.seq_len."""


def _validate_source_name(name: str) -> str:
    """Validate that the name of a source consists only of letters, digits, - and _. Return it unchanged.

    Raises ``ValueError`` if it does not.
    """
    if SOURCE_NAME_PATTERN.fullmatch(name) is None:
        raise ValueError(f"may only contain letters, digits, - and _, got {name[:60]!r}; rename the source")
    return name


SourceName = Annotated[str, AfterValidator(_validate_source_name)]


class MixedSource(SourceConfig):
    """A source in ``data.sources``, with its weight or epochs in the mixture."""

    name: SourceName
    """Name of the source in logs and files."""
    weight: Weight | None = None
    """Share of the samples, relative to the weights of the other sources."""
    epochs: Epochs | None = None
    """Number of passes over this source in one pass over the mixture, instead of a weight."""


class Phase(Section):
    """Weights of the sources of a mixture, which apply from a step on."""

    step: Steps
    """First step with these weights."""
    weights: dict[str, Weight]
    """Weights by the name of the source."""


def _choose_eval_tag(value: Any) -> str:
    """Return the tag that pydantic uses to select the type of a value of ``data.eval``.

    A mapping of mappings is a group of named sources, unless one of its keys is a setting. Any other
    value is a single source.
    """
    several = isinstance(value, dict) and value and not value.keys() & SourceConfig.model_fields.keys()
    return (
        NAMED_EVAL_TAG
        if several and all(isinstance(source, dict | SourceConfig) for source in value.values())
        else SINGLE_EVAL_TAG
    )


EvaluationSources = Annotated[
    Annotated[SourceConfig, Tag(SINGLE_EVAL_TAG)]
    | Annotated[dict[SourceName, SourceConfig], Tag(NAMED_EVAL_TAG)],
    Discriminator(_choose_eval_tag),
]


class DataConfig(SourceConfig):
    """Training data: sources, format of the records, tokenizer, packing, evaluation data."""

    sources: Annotated[tuple[MixedSource, ...], Field(strict=False)] = ()
    """A mixture of sources, instead of data.source, such as [{name: web, source: web/*.jsonl, weight: 3},
    {name: code, source: code.jsonl, weight: 1}]. Each source may also set every setting marked ‡. weight is
    the share of the samples, in any few hundred samples. Alternatively, set epochs for every source: the
    number of times that it is read in one pass over the mixture (default: 1)."""
    weight_schedule: Annotated[tuple[Phase, ...], Field(strict=False)] = ()
    """Weights of data.sources that change during the run, such as [{step: 9000, weights: {web: 1, code: 4}}].
    From that step on, they replace all earlier weights."""
    shuffle_window: PartCount = Field(default=1, json_schema_extra=IDENTITY)
    """Number of parts of a stream whose samples are mixed. A larger window shuffles better, and the run
    starts later, because that many parts must be tokenized first."""
    cache_limit: Gigabytes | None = None
    """Maximum size of a stream's tokens on disk, in gigabytes. Deleted tokens are computed again when they
    are needed. Null: half of the free space at the start."""
    images: Flag | None = None
    """Whether conversations may have images, for a model that accepts images: parts of a message such as
    {type: image, path: cat.jpg}, or a field images of the record. Null: whether one of the first 1,000
    records has one."""
    image_max_pixels: Pixels | None = None
    """Number of pixels above which an image is scaled down before the model's own processor gets it. A
    smaller number makes fewer tokens. Null: only the limits of the processor."""
    chat_template: PathText | None = None
    """Template that renders a conversation as text: a .jinja file, the name of one of the templates of the
    tokenizer, or chatml. It is saved with the tokenizer. Null: the default template of the tokenizer."""
    chat_template_kwargs: OpenMapping = Field(default_factory=dict)
    """Additional variables of the template, such as enable_thinking: false. strftime_now is the date that a
    template writes as the current date; it is 2025-01-01 by default, so that tokens are always the same."""
    truncation: Literal["end", "start", "drop", "error"] = Field(default="end", json_schema_extra=IDENTITY)
    """Truncation mode for a text or conversation that is longer than data.seq_len and is not packed: cut
    its end or start, leave it out (drop), or end the run (error). A conversation without a trained token
    after the cut is left out. The run prints how many were cut or left out."""
    source_language: str | None = Field(default=None, min_length=1)
    """Language of the texts, as a code of a multilingual tokenizer: eng_Latn for NLLB, en_XX for mBART, en
    for M2M100 (seq2seq-lm)."""
    target_language: str | None = Field(default=None, min_length=1)
    """Language of the targets, as a code of the tokenizer. The saved model generates in this language."""
    tokenizer: PathText | None = None
    """Hub id or folder of a tokenizer. Null: the tokenizer of model.name_or_path. For a model that is built
    from scratch, a small byte-pair encoding is trained on the source and cached."""
    added_tokens: Names = Field(default=(), json_schema_extra=IDENTITY)
    """Special tokens to add to the tokenizer, such as the tokens of a chat template. The vocabulary of the
    model grows if necessary; new rows are drawn around the mean of the other rows, as in transformers."""
    vocab_size: VocabularySize | None = None
    """Number of tokens of the byte-pair encoding that is trained if there is no tokenizer. Null: the
    vocab_size of the model."""
    seq_len: Length = Field(default=256, ge=2, json_schema_extra=IDENTITY)
    """Length of a training sequence in tokens. The memory for activations grows with it."""
    target_seq_len: Length | None = Field(default=None, ge=2, json_schema_extra=IDENTITY)
    """Length of a target text in tokens (seq2seq-lm). Null: data.seq_len."""
    packing: Flag | Annotated[Literal["documents"], AnyCase] = Field(default=True, json_schema_extra=IDENTITY)
    """Packing mode. true concatenates texts into full sequences (language models only).
    documents, the default for conversations, packs complete texts that do not influence each other (causal-lm
    only). false, the only choice for seq2seq-lm and sequence-classification, puts one text into each sequence
    and truncates or pads it to data.seq_len."""
    eval_fraction: ProperFraction | None = Field(default=None, json_schema_extra=IDENTITY)
    """Share of the training data that is held out for evaluation: the end of the concatenated text, or a
    fixed choice of records if texts are not concatenated. Null: 0.01, but at least 16 sequences or records
    and at most a fifth of the data. 0, the default with data.eval: nothing is held out."""
    eval: EvaluationSources | None = None
    """Data to evaluate on: a source such as {source: test.jsonl} or {split: validation}, or several sources
    by name, such as {news: {source: news.jsonl}, code: {source: code.jsonl}}. Each may set every setting
    marked ‡; all other settings are the same as for training. Null: the share in data.eval_fraction."""
    num_workers: Processes = 0
    """Number of processes that prepare batches for each rank. 0: the rank prepares its batches itself. Raise
    it if the accelerator waits for data. For a stream, it is also the number of tokenizing processes per
    machine, which is at least one."""
    cache_dir: PathText | None = None
    """Folder that caches tokenized data and trained tokenizers. Null: the cache folder of the user
    ($XDG_CACHE_HOME, or ~/.cache)."""

    @property
    def sequences_per_sample(self) -> int:
        """Number of sequences in a sample: two for preference data, otherwise one."""
        return 2 if self.format == "preference" else 1

    @property
    def max_sequence_length(self) -> int:
        """Larger of ``data.seq_len`` and ``data.target_seq_len``, in tokens."""
        return max(self.seq_len, self.target_seq_len or 0)


class ParameterGroup(Section):
    """Parameters with a separate learning rate or weight decay."""

    pattern: str = Field(min_length=1)
    """Regular expression that is searched in the names of parameters."""
    learning_rate: LearningRate | None = None
    """Highest learning rate of these parameters. Null: train.learning_rate."""
    weight_decay: WeightDecay | None = None
    """Weight decay of these parameters. Null: train.weight_decay."""


class TrainConfig(Section):
    """Length of the run, batch sizes, loss, optimizer, learning rate, evaluation."""

    steps: Steps | None = Field(default=200, ge=1, json_schema_extra=IDENTITY)
    """Length of the schedule in optimizer steps. May be null only if train.epochs is set."""
    epochs: Epochs | None = Field(default=None, json_schema_extra=IDENTITY)
    """Length of the schedule in passes over the data, instead of train.steps."""
    stop_after: Steps | None = Field(default=None, ge=1)
    """Save a checkpoint and stop after this step. The same command without this setting resumes the run,
    possibly on another machine."""
    global_batch_size: BatchSize = Field(default=8, json_schema_extra=IDENTITY)
    """Sequences in one optimizer step, summed over all ranks and accumulation steps."""
    micro_batch_size: BatchSize | Literal["auto"] = 4
    """Sequences in one forward pass on a device. Gradients are accumulated until the global batch is
    complete. Lower it if memory runs out; the result stays the same and only the speed changes. auto tries
    sizes and uses the largest size that fits. It is not available on XLA. On a CPU without a memory limit
    (ulimit -v), it uses at most 4. The default is lowered to a divisor of train.global_batch_size."""
    learning_rate: LearningRate = Field(default=3e-4, json_schema_extra=IDENTITY)
    """Highest learning rate, which is reached at the end of the warmup."""
    schedule: Annotated[ScheduleKind, OrPlugIn] = Field(default="cosine", json_schema_extra=IDENTITY)
    """Learning-rate schedule after the warmup. wsd (warmup-stable-decay) keeps the rate constant until
    the last part of the run. Capitalized names are the schedulers of DeepSpeed, which work on any backend
    (OneCycle and LRRangeTest need zero1, zero2 or zero3). Or a custom function or class, written
    package.module:name."""
    schedule_params: OpenMapping = Field(default_factory=dict, json_schema_extra=IDENTITY)
    """More parameters of the schedule. wsd: decay_ratio (0.2 of all steps), decay_type and warmup_type
    (linear, cosine or 1-sqrt). inverse_sqrt: timescale (the warmup steps). For the schedulers of DeepSpeed,
    use the names of DeepSpeed's parameters; train.learning_rate is the peak of OneCycle and the first rate
    of LRRangeTest."""
    warmup_steps: Steps | None = Field(default=None, json_schema_extra=IDENTITY)
    """Steps in which the learning rate rises from zero to train.learning_rate, linearly unless the schedule
    defines another shape. Null: train.warmup_ratio is used."""
    warmup_ratio: Fraction | None = Field(default=None, json_schema_extra=IDENTITY)
    """Warmup as a share of all steps, rounded up, instead of train.warmup_steps."""
    min_learning_rate_ratio: Fraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Final learning rate of cosine, linear and wsd, and lowest learning rate of inverse_sqrt, as a share of
    train.learning_rate."""
    optimizer: Annotated[Literal["adamw", "adafactor", "adamw_8bit", "sgd", "muon"], OrPlugIn] = Field(
        default="adamw", json_schema_extra=IDENTITY
    )
    """adamw (fused, with two fp32 moments), adafactor (factored moments, little memory), adamw_8bit
    (8-bit moments, except for embeddings, vectors and small matrices), sgd (its momentum is the first
    value of train.betas), muon (orthogonalized momentum for the matrices of layers, and adamw for
    everything else), or any torch.optim.Optimizer, written package.module:name, such as
    torch.optim:NAdam(momentum_decay=0.004)."""
    master_dtype: Literal["fp32", "bf16"] = Field(default="fp32", json_schema_extra=IDENTITY)
    """Dtype of the trained weights, their gradients, and the moments of the optimizer (8-bit moments keep 8
    bits). bf16 halves their size: adamw needs 8 bytes per parameter instead of 16. The update is computed in
    fp32 and rounded stochastically. bf16 requires precision bf16 and the optimizer adamw or adamw_8bit. It
    is not supported with adapters, ZeRO, or XLA."""
    betas: Annotated[tuple[ProperFraction, ProperFraction], Field(strict=False)] = Field(
        default=(0.9, 0.95), json_schema_extra=IDENTITY
    )
    """Decay rates of the first and the second moment. Raise the second towards 0.999 for small or noisy
    batches."""
    eps: Epsilon = Field(default=1e-8, json_schema_extra=IDENTITY)
    """Number that is added to the root of the second moment to avoid a division by zero."""
    weight_decay: WeightDecay = Field(default=0.1, json_schema_extra=IDENTITY)
    """Weight decay of all parameters except biases and norms, as in the Trainer. It is decoupled for adamw
    and muon, and added to the gradient for sgd."""
    parameter_groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = Field(
        default=(), json_schema_extra=IDENTITY
    )
    """Parameters with a different learning rate or weight decay, such as [{pattern: lora_B, learning_rate:
    5.0e-3}, {pattern: embed_tokens, weight_decay: 0}]. pattern is a regular expression that is searched in
    the names of parameters; the first group that matches counts. learning_rate follows the schedule in
    proportion. weight_decay does not apply to biases and norms."""
    max_grad_norm: GradientNorm | None = Field(default=1.0, json_schema_extra=IDENTITY)
    """Largest global norm of the gradients. Gradients with a larger norm are scaled down to it. Null: no
    clipping."""
    fused_backward: Flag = False
    """Update each parameter during the backward pass, as soon as its gradient is complete, and free the
    gradient. This saves the memory of the gradients and does not change the result. It requires one
    micro-batch per step, train.max_grad_norm: null, and train.on_non_finite: stop. It is not supported with
    muon, custom optimizers, fp16, offloading, ZeRO, or XLA."""
    muon_momentum: ProperFraction = Field(default=0.95, json_schema_extra=IDENTITY)
    """Nesterov momentum of muon for matrices."""
    muon_rate: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw", json_schema_extra=IDENTITY
    )
    """Scaling of Muon's learning rate for a matrix of R rows and C columns, as adjust_lr_fn in torch.
    match_rms_adamw multiplies it by 0.2 sqrt(max(R, C)), so that a learning rate tuned for adamw can be
    used. original multiplies it by sqrt(max(1, R / C))."""
    adafactor_rule: Literal["torch", "transformers"] = Field(default="torch", json_schema_extra=IDENTITY)
    """Library whose update rule adafactor uses. torch: the learning rate is relative to the RMS of a
    parameter, and is at most 1 / sqrt(step). transformers: the learning rate is absolute, as in the Trainer
    (scale_parameter and relative_step false); use a rate that is 10 to 100 times lower."""
    loss: PlugIn | None = Field(default=None, json_schema_extra=IDENTITY)
    """dpo, ipo, simpo or orpo for data.format preference, or a custom loss, written package.module:name.
    Arguments are written dpo(beta=0.2). Null: cross-entropy, or the loss for the problem_type of a
    classifier."""
    label_smoothing: ProperFraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Share of each target that is spread evenly over all tokens or classes. It does not apply to the loss of
    an evaluation."""
    z_loss: LossWeight = Field(default=0.0, json_schema_extra=IDENTITY)
    """Weight of the squared logarithm of the softmax's normalizer, a term that keeps logits from drifting.
    1e-4 is common for pretraining. It is not part of the loss of an evaluation."""
    neftune_noise_alpha: NoiseScale = Field(default=0.0, json_schema_extra=IDENTITY)
    """Size of the noise that is added to embeddings in training (NEFTune), scaled by the length of each
    document. 5 is common for fine-tuning on conversations. 0: no noise."""
    dropout: Flag | None = Field(default=None, json_schema_extra=IDENTITY)
    """Whether dropout is active in training, including the dropout of an adapter. Null: inactive for losses
    on pairs, as in TRL, and active otherwise."""
    trainable: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Regular expressions. Only parameters whose name contains a match are trained, such as lm_head, or
    layers\\.(30|31)\\. for two layers. All other parameters are frozen: they have no gradient and no
    optimizer state, and do not change. Null: all parameters are trained."""
    frozen: Names = Field(default=(), json_schema_extra=IDENTITY)
    """Regular expressions. Parameters whose name contains a match are frozen, such as embed_tokens, even if
    train.trainable matches as well."""
    ema: AverageDecay | None = Field(default=None, json_schema_extra=IDENTITY)
    """Decay of an average of the weights over the steps, such as 0.999: the share of the average that remains
    after each step. The average is computed in fp32 and saved in checkpoints; checkpoint.export_ema exports
    it. Null: no average."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """Action on a NaN or infinite loss or gradient. The update is always skipped, so that weights
    and optimizer state do not change. stop ends the run and reports the step, its samples and how to find the
    cause (--replay). skip continues, counts skipped_steps, and ends the run after ten such steps in a row. An
    overflow under fp16 only lowers the loss scale."""
    eval_every: Interval | None = 100
    """Steps between evaluations on the held-out records. Null: evaluate only at the end."""
    eval_every_epochs: Epochs | None = None
    """Passes over the data between evaluations, instead of train.eval_every. 0.5 evaluates in the middle and
    after the last step of each epoch."""
    eval_batches: Interval | None = None
    """Largest number of global batches in one evaluation. Null: all held-out records."""
    eval_ema: Flag = False
    """Evaluate the average of the weights (train.ema) instead of the weights."""
    metrics: Annotated[tuple[str, ...], OneOrMany, Field(strict=False)] | None = None
    """Metrics of an evaluation in addition to the loss. For tokens: perplexity and accuracy. For a
    classifier: accuracy, f1 and confusion. For a regression: mse, mae and r2. For generated texts
    (seq2seq-lm): exact_match and rouge_l. Or a custom function or class, written package.module:name. Null:
    all metrics of the task that do not generate text, or no metrics with train.loss. []: only the loss."""
    early_stopping_patience: Interval | None = None
    """End the run after this many evaluations in a row in which checkpoint.best_metric did not improve. Null:
    never."""
    early_stopping_threshold: Threshold = 0.0
    """Difference by which an evaluation must be better than the best evaluation so far to count as an
    improvement."""
    callbacks: Annotated[tuple[PlugIn, ...], OneOrMany, Field(strict=False)] = ()
    """Custom callbacks, written package.module:name or package.module:name(argument=value). They are called
    at the start, after steps, logs, evaluations and saves, and at the end."""

    @property
    def has_frozen_patterns(self) -> bool:
        """Whether ``train.trainable`` or ``train.frozen`` freezes parameters."""
        return self.trainable is not None or bool(self.frozen)


class MemoryConfig(Section):
    """Options that save memory and cost speed. They do not change the result."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Compute activations again in the backward pass instead of storing them. full: of every layer, which
    needs the least memory and is about a third slower. selective: all except the results of expensive
    operations."""
    offload_activations: Flag = False
    """Keep the activations of layers in host memory between the forward and the backward pass. With
    activation checkpointing, only the inputs of the layers are stored, so only these inputs are offloaded.
    The copies overlap with the computation. It is not supported on TPUs. With compile, it also requires
    activation checkpointing."""
    loss_chunk_tokens: ChunkTokens | Literal["auto"] = "auto"
    """Number of tokens whose logits are in memory at once. The loss of a larger micro-batch is computed in
    chunks, and again in the backward pass. auto allows 64 million logits (256 MiB), which matters for large
    vocabularies. 0: all tokens at once. Only for FSDP and DDP."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Keep and update the optimizer state in host memory (cpu) or on a local disk (nvme). This is slower."""
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """Keep sharded parameters in host memory (cpu) or on a local disk (nvme) while they are not used. With
    FSDP, the optimizer state and the update are offloaded as well. This is the slowest option."""
    nvme_path: PathText | None = None
    """Folder on a fast local disk, for offloading to nvme."""

    @property
    def has_offloading(self) -> bool:
        """Whether the optimizer state or the parameters are offloaded from the devices."""
        return (self.offload_optimizer, self.offload_params) != ("none", "none")


class FsdpConfig(Section):
    """Details of FSDP, with settings named as in Accelerate. Null: the default of the backend."""

    shard_group_size: Ranks | None = None
    """Number of ranks (on XLA: devices) that share one sharded copy of the state in hybrid_shard and
    hybrid_shard_zero2. Null: the ranks of one node (on XLA: the devices of one slice)."""
    auto_wrap_policy: (
        Annotated[Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"], AnyCase] | None
    ) = None
    """Modules that are sharded and gathered as a unit: each transformer layer, each module of at least
    fsdp.min_num_params parameters, or the entire model. Null: each transformer layer."""
    transformer_layer_cls_to_wrap: Names | None = None
    """Class names of the layers for transformer_based_wrap. Null: the classes that the model declares."""
    min_num_params: ModuleSize | None = None
    """Smallest module for size_based_wrap, in parameters."""
    forward_prefetch: Flag | None = None
    """Gather the parameters of the next unit during the forward pass of the current unit. Hides more
    communication and needs more memory."""
    backward_prefetch: Annotated[Literal["backward_pre", "backward_post", "no_prefetch"], AnyCase] | None = (
        None
    )
    """Prefetch mode of the backward pass. backward_pre, the default: gather the parameters of the next unit
    before computing the gradients of the current unit, which hides the most communication. backward_post and
    no_prefetch, which are the same in FSDP2: gather them after computing the gradients, which needs less
    memory."""


class Fp16Config(Section):
    """Dynamic loss scaling for precision fp16, with settings named as in DeepSpeed."""

    initial_scale_power: ScalePower = 16
    """Initial loss scale as a power of 2. Lower it if the first updates are skipped."""
    loss_scale_window: Interval = 1000
    """Number of updates without an overflow after which the scale is doubled."""
    hysteresis: Interval = 2
    """Number of overflows since the last doubling after which the scale is halved. 1: every overflow halves
    the scale."""
    min_loss_scale: LossScale = 1.0
    """Smallest loss scale. The run ends if gradients overflow at this scale."""


class DeepSpeedConfig(Section):
    """DeepSpeed's own settings, for strategies zero1, zero2 and zero3."""

    config: PathText | OpenMapping | None = None
    """A DeepSpeed JSON file, or its content as a mapping. Its auto values are filled in from this config. The
    JSON overrides the defaults of this config; if a setting in this config differs from the JSON, the run is
    refused."""


class XlaConfig(Section):
    """Details of XLA. Null: the default of the backend."""

    buffer_dtype: XlaDtype | None = None
    """Dtype of the model's floating-point buffers in the computation. Null: the dtype of each buffer."""
    shard_param_on_dim_0: Flag | None = None
    """Shard every parameter along its first dimension, even if another dimension is longer."""
    optimization_barrier_in_backward: Flag | None = None
    """Prevent the compiler from merging the gathers of different units in the backward pass."""
    sharding: dict[str, Dimension | None] | None = None
    """Mapping from regular expressions to dimensions. A parameter whose name matches an expression is
    sharded along this dimension, or replicated if the value is null. The first match counts. Parameters
    without a match are sharded as usual."""
    scan_layers: Flag = False
    """Compile identical layers once and run them in a loop, so that compile time does not grow with the
    number of layers."""
    attention_rows: Length | None = None
    """Compute attention for this many tokens of a sequence at once. Only the scores of these tokens are in
    memory, and they are computed again in the backward pass. Null: all tokens at once."""
    compilation_cache: PathText = "auto"
    """Folder that caches compiled graphs, or none. auto: on a TPU, a folder in the cache of the user; on
    virtual devices none, because their graphs cannot be cached."""


class CheckpointConfig(Section):
    """Saving of checkpoints, resuming from them, and the export of the model at the end."""

    every_steps: Interval | None = 100
    """Steps between checkpoints. Null: save only when the run stops."""
    every_epochs: Epochs | None = None
    """Passes over the data between checkpoints, instead of checkpoint.every_steps."""
    keep: Interval | None = 3
    """Number of newest checkpoints that are kept; older checkpoints are deleted. Null: keep all."""
    keep_best: Interval | None = None
    """Number of checkpoints with the best checkpoint.best_metric that are kept in addition to the newest. If
    an evaluation is among the best so far, a checkpoint is saved after it. Null: keep only the newest."""
    best_metric: str | None = Field(default=None, min_length=1)
    """Metric that ranks checkpoints, by its name in metrics.jsonl: eval_accuracy, or eval_loss/news for the
    source news. Null: the eval_loss of the first source."""
    best_mode: Literal["auto", "min", "max"] = "auto"
    """Whether the lowest (min) or the highest (max) value is the best. auto: as is usual for the metric; a
    custom metric may define higher_is_better."""
    async_: Flag = Field(default=True, alias="async")
    """Write checkpoints in the background, from a copy of the state in host memory. False: training waits
    until a checkpoint is on disk, and there is no copy."""
    resume: PathText = "auto"
    """auto: resume from the newest complete checkpoint in output_dir, if there is one. never: raise an error
    if output_dir already contains checkpoints. A path or URL: start from this checkpoint if output_dir
    contains none. It can be a checkpoint of another program (docs/moving.md)."""
    allow_changes: Flag = False
    """Continue the run in output_dir even if settings of the optimizer or the schedule have changed, such as
    train.learning_rate. More train.steps or train.epochs are always allowed."""
    resume_step: Steps | None = None
    """Number of optimizer steps to treat as completed if checkpoint.resume is a checkpoint of another
    program. The schedule continues from there; 0 restarts it. Null: the step that the checkpoint
    contains."""
    resume_samples: Samples | None = None
    """Number of sequences to treat as consumed if checkpoint.resume is a checkpoint of another program. The
    order of the data continues from there. Null: the number that the checkpoint contains, or its steps times
    train.global_batch_size."""
    export: Flag | Literal["merged", "like_base"] = True
    """At the end, write safetensors for from_pretrained into <output_dir>/final: the model, or only the
    adapter, in peft's format. merged: the model with the adapter merged into it. like_base: quantized like
    model.name_or_path, with an adapter merged into it."""
    export_best: Flag = False
    """Write <output_dir>/final from the best checkpoint instead of the last."""
    export_ema: Flag = False
    """Write <output_dir>/final from the average of the weights (train.ema)."""
    staging_dir: PathText | None = None
    """If output_dir is a URL: local folder for shards before their upload. It needs space for the part of a
    checkpoint that this machine writes. Null: the temporary folder of the system."""
    max_outage_minutes: Minutes = 60.0
    """If output_dir is a URL: minutes for which saves may fail because the object store does not answer.
    Training continues, and each save tries again."""

    @property
    def saves_during_training(self) -> bool:
        """Whether checkpoints are written during training, not only at the end."""
        return self.every_steps is not None or self.every_epochs is not None


class LogConfig(Section):
    """Logs, trackers and samples of the run."""

    every_steps: Interval = 10
    """Steps between lines in metrics.jsonl and on the console. Each line synchronizes the host with the
    device."""
    hang_timeout: Seconds | None = 480.0
    """Seconds without a new batch after which every rank writes its stack traces to <output_dir>/hang/ and
    exits. The first batch may take four times as long. Null: no limit."""
    memory_snapshot: Flag = False
    """Record allocations of GPU memory. If memory runs out, they are written to <output_dir>/memory/ for
    https://pytorch.org/memory_viz. Costs a few percent of speed. GPUs only."""
    trackers: Annotated[tuple[Tracker, ...], OneOrMany, Field(strict=False)] = ("tensorboard",)
    """Trackers for the metrics, in addition to metrics.jsonl. []: none. Every tracker except tensorboard
    needs its own package. Or a custom class with the methods of accelerate.tracking.GeneralTracker, written
    package.module:name."""
    project: str | None = Field(default=None, min_length=1)
    """Project of the run in trackers. Null: WANDB_PROJECT (or the variable of another tracker), otherwise the
    name of the folder that contains output_dir."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run in trackers. All launches of a run appear as one run. Null: the last part of
    output_dir."""
    sample_prompt: str | None = Field(default=None, min_length=1)
    """Text that a generative model continues at the end of the run. Null: the start of a held-out text."""
    sample_tokens: GeneratedTokens = 64
    """Number of tokens to generate after log.sample_prompt at the end of the run. 0: no sample."""
    quiet: Flag = False
    """Print only warnings and errors (--quiet). Everything else is still written to log.txt in the folder of
    the run."""


class HubConfig(Section):
    """Uploads of exports to the Hugging Face Hub."""

    push: Literal["end", "checkpoints"] | None = None
    """Files to upload. end: <output_dir>/final with a model card, at the end. checkpoints: also the export of
    every checkpoint, each as a commit. Optimizer state and data are never uploaded. The token comes from
    HF_TOKEN or hf auth login. Null: nothing."""
    repo: str | None = Field(default=None, min_length=1)
    """Repository, such as organization/name. It is created if it does not exist. Null: the last part of
    output_dir, under the user name of the token."""
    private: Flag = True
    """Create a private repository, and refuse a repository that is public. False: create a public repository;
    the visibility of an existing repository does not change."""
