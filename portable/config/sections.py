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
"""Regular expression that the name of a source must match."""
SINGLE_EVAL_TAG, NAMED_EVAL_TAG = "[one]", "[several]"
"""Tags in pydantic's error paths for the two forms of ``data.eval``: one source, or several by name.

The brackets, as in pydantic's ``[key]``, ensure that a tag never equals the name of a source.
"""


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
    """Hub id or local folder of the transformers model to train. Training starts from its weights, unless
    model.init is ``scratch``. null: build the model in model.config with random weights."""
    config: OpenMapping | None = Field(default_factory=_build_quickstart_model, json_schema_extra=IDENTITY)
    """Config of a model to build with random weights: ``model_type``, and any keys of its transformers
    config. In a file, this mapping replaces the complete default. A flag such as ``--model.config.hidden_size
    512`` changes only one key. If model.name_or_path is set, the mapping contains only the keys to change in
    the config of that model, such as ``attention_dropout``. Keys that determine the shapes of weights cannot
    be changed."""
    task: Task = Field(default="causal-lm", json_schema_extra=IDENTITY)
    """Training task. causal-lm: predict the next token. masked-lm: predict masked tokens. seq2seq-lm:
    generate a target text from an input text. sequence-classification: predict a class, several classes, or a
    number (regression)."""
    init: Literal["pretrained", "scratch"] = Field(default="pretrained", json_schema_extra=IDENTITY)
    """Initial weights if model.name_or_path is set. pretrained: the weights of that model. scratch: random
    weights; only the architecture of that model is used."""
    function: PlugIn | None = Field(default=None, json_schema_extra=IDENTITY)
    """Custom function that changes the model, as ``package.module:name``. The function receives the model on
    the meta device, and either modifies it in place or returns another model. Its module can also register
    model types when it is imported. null: no function."""
    attention: Annotated[Attention, OrHubKernel] = "sdpa"
    """Attention implementation. On CUDA, it can also be a kernel on the Hub, such as
    ``kernels-community/flash-attn3``. sdpa: PyTorch's ``scaled_dot_product_attention``. eager: two matrix
    products with a softmax between them, which is slow. flex_attention: PyTorch's FlexAttention, only on
    CUDA. flash_attention_2, flash_attention_3, flash_attention_4: FlashAttention, only on CUDA. These
    versions require bf16 or fp16, and either their own package, such as ``flash-attn``, or the package
    ``kernels``."""
    experts: Literal["eager", "batched_mm", "grouped_mm"] | None = None
    """Implementation of the expert layers of a mixture-of-experts model. eager: compute the experts one after
    another. batched_mm, grouped_mm: compute all experts in one matrix product. null: transformers chooses the
    implementation, which is grouped_mm if the device supports it."""
    trust_remote_code: Flag = False
    """Allow code from the repository of the model to run. Enable this only for repositories whose code you
    have read."""

    @property
    def setting_key(self) -> str:
        """Key of the setting that defines the model, used in error messages.

        The key is ``model.name_or_path`` if this setting has a value, otherwise ``model.config``.
        """
        return "model.config" if self.name_or_path is None else "model.name_or_path"

    @property
    def from_scratch(self) -> bool:
        """Whether training starts from random weights."""
        return self.name_or_path is None or self.init == "scratch"


Tokens = Annotated[tuple[TokenId, ...], Field(strict=False, min_length=1)]


class AdapterConfig(Section):
    """An adapter, with settings named as in peft. The weights of the model stay frozen."""

    type: Literal["lora", "ia3"] | None = Field(default=None, json_schema_extra=IDENTITY)
    """Type of the adapter. lora: add low-rank matrices to the weights of linear layers (LoRA). ia3: multiply
    activations by trained vectors (IA3). null: no adapter; all weights of the model are trained."""
    r: AdapterRank = Field(default=16, json_schema_extra=IDENTITY)
    """Rank of the LoRA matrices. A higher rank can learn more, but needs more memory."""
    alpha: AdapterScale = Field(default=32, json_schema_extra=IDENTITY)
    """Scale of the adapter. Its output is multiplied by ``alpha / r``, or by ``alpha / sqrt(r)`` if
    adapter.use_rslora is ``true``."""
    dropout: ProperFraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Dropout probability of the adapter's inputs."""
    target_modules: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(strict=False)], NamesOrPattern
    ] = Field(default="all-linear", json_schema_extra=IDENTITY)
    """Modules that get an adapter: ``all-linear`` for all linear layers except the output head, a list of
    names such as ``[q_proj, v_proj]``, or a regular expression that matches complete module names. The list
    may be empty if adapter.target_parameters is set."""
    target_parameters: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Parameters, rather than modules, that get an adapter, such as ``[mlp.experts.gate_up_proj]`` for
    stacked expert weights. Only for ``lora``."""
    modules_to_save: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Modules that are trained and saved in full in addition to the adapter, such as ``[lm_head]``. The head
    of a classifier is always included."""
    trainable_token_indices: Tokens | dict[str, Tokens] | None = Field(
        default=None, json_schema_extra=IDENTITY
    )
    """Ids of tokens whose embeddings are trained and saved with the adapter, such as the tokens in
    data.added_tokens. The value is a list such as ``[502, 503]``, or a mapping with one list per embedding
    table, such as ``{embed_tokens: [502], lm_head: [502]}``. An output head that is tied to the embeddings
    shares the trained rows. Only for ``lora``."""
    ensure_weight_tying: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """Raise an error if adapter.trainable_token_indices lists different tokens for embedding tables whose
    weights are tied. Only for ``lora``."""
    layers: Annotated[tuple[LayerNumber, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, json_schema_extra=IDENTITY
    )
    """Indices of the layers that get an adapter, starting at 0. null: all layers."""
    bias: Literal["none", "all", "lora_only"] = Field(default="none", json_schema_extra=IDENTITY)
    """Biases that are trained in addition to the adapter. Only for ``lora``. none: no biases. all: all biases
    of the model. lora_only: only the biases of modules with an adapter."""
    init: Flag | Literal["gaussian", "orthogonal"] = Field(default=True, json_schema_extra=IDENTITY)
    """Initialization of the LoRA matrices. true: as in the LoRA paper, so that the adapter initially does not
    change the output of the model. false: random values in both matrices. gaussian, orthogonal: the
    initialization with this name in peft."""
    use_dora: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """Use DoRA, which trains the magnitude of each weight row separately from its direction. DoRA is slower
    than LoRA."""
    use_rslora: Flag = Field(default=False, json_schema_extra=IDENTITY)
    """Use rank-stabilized LoRA (rsLoRA), which scales the adapter's output by ``alpha / sqrt(r)``, so that
    high ranks learn as fast as low ranks."""
    base: Literal["auto", "bf16", "fp16", "fp32", "nf4", "int8"] = Field(
        default="auto", json_schema_extra=IDENTITY
    )
    """Dtype of the frozen weights. nf4 and int8 quantize all linear layers except the output head. They
    require the ``bitsandbytes`` package and an FSDP strategy or ``no_shard``. auto: the dtype of the
    computation (``precision``). bf16, fp16: 16-bit floating point. fp32: 32-bit floating point, which keeps
    the weights exact, but needs twice as much memory. nf4: 4 bits with double quantization (QLoRA). int8: 8
    bits."""
    name_or_path: PathText | None = Field(default=None, json_schema_extra=IDENTITY)
    """Hub id or folder of an adapter in peft's format from which training continues. Its
    ``adapter_config.json`` determines all settings above except adapter.base and adapter.dropout. null: train
    a new adapter."""
    config: PathText | None = None
    """Path of an ``adapter_config.json`` that replaces the settings above. null: use the settings above."""


class SourceConfig(Section):
    """A source of records, and settings for reading them."""

    # Paths and field names may differ between machines, so they do not define the run. Checkpoints contain a
    # digest of the tokens, which must match.

    source: PathText | Annotated[tuple[PathText, ...], Field(strict=False, min_length=1)] | None = None
    """Records to train on: a dataset on the Hub, a file, a glob, a list of files, or custom code that yields
    records, as ``package.module:name``. Files can be .txt, .jsonl, .json, .csv or .parquet, on a local disk
    or at a URL. null: the source code of Python's standard library."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Action if a record cannot be read. The first few of these bad records are printed with their file and
    line, and all of them are counted. error: end the run. skip: leave out the record."""
    stream: Flag = False
    """Tokenize the data during training, shortly before it is needed (only for causal-lm). At most
    data.cache_limit gigabytes of tokens are kept on disk. Use a stream if the data is larger than the disk,
    to start training immediately, or to train on tokens written by ``portable-data``. A stream holds out no
    data for evaluation, so set data.eval, which is tokenized before the first step."""
    config_name: str | None = None
    """Name of the dataset configuration, such as ``wikitext-2-raw-v1``, for a dataset on the Hub, or a local
    copy of it, that has several configurations."""
    split: str = Field(default="train", min_length=1)
    """Split to train on. For a dataset on the Hub, it can be a slice such as ``train[:10%]``. In a folder,
    the file names determine the split."""
    max_samples: Records | None = None
    """Maximum number of records to use, from the start of the source. Set a small number to try out a config.
    null: all records."""
    format: Format = "auto"
    """Format of the records (only for causal-lm). auto: detected from the first record. text: plain text.
    messages: a conversation, whose messages have ``role`` and ``content``. sharegpt: a conversation, whose
    messages have ``from`` and ``value``. prompt_completion: a prompt and a completion, each a string or a
    list of messages. alpaca: an instruction, an input and an output. preference: a prompt, a chosen answer
    and a rejected answer, for a preference loss such as DPO. samples: samples that custom code has already
    tokenized."""
    train_on: Literal["assistant", "completion", "last_assistant", "all"] | None = None
    """Tokens of a conversation that count in the loss. assistant: everything that the assistant writes.
    completion: everything after the prompt. last_assistant: the last message of the assistant. all: all
    tokens. null: ``completion`` for the formats ``prompt_completion`` and ``alpaca``, otherwise
    ``assistant``."""
    roles_to_train: Annotated[tuple[Role, ...], OneOrMany, Field(strict=False, min_length=1)] | None = None
    """Roles whose messages count in the loss, including the end of each turn. null: only messages of the
    assistant, selected by data.train_on."""
    split_turns: Flag = False
    """Make a separate sample of each message of the assistant, together with the conversation before it. This
    always happens if the chat template renders earlier turns differently from the last turn, for example
    without their reasoning."""
    image_root: PathText | None = None
    """Folder that contains the images to which conversations refer by path. A record with an image outside
    this folder is a bad record (data.on_bad_record). null: the folder of data.source."""
    image_urls: Flag | Annotated[Literal["private"], AnyCase] = False
    """Whether to download images to which conversations refer by URL. false: a record with such an image is a
    bad record (data.on_bad_record). true: download images from public servers. private: also download images
    from servers with a private address, such as a server in your network. Use this only for trusted data."""
    text_field: str = Field(default="text", min_length=1)
    """Field of a record that contains the text. A dot selects a nested field, such as ``translation.en``,
    here and in the settings below."""
    text_pair_field: str | None = Field(default=None, min_length=1)
    """Field with the second text of a pair, such as the hypothesis that belongs to a premise (only for
    sequence-classification). If a pair is longer than data.seq_len, the longer text is truncated first. null:
    no second text."""
    target_field: str = Field(default="target", min_length=1)
    """Field with the target text (only for seq2seq-lm)."""
    source_prefix: str = ""
    """Text to add in front of every input, such as ``'summarize: '`` for T5 (only for seq2seq-lm)."""
    label_field: str = Field(default="label", min_length=1)
    """Field with the label (only for sequence-classification). The label is an integer or a string for one
    class, a list for several classes, or a decimal number such as ``0.5`` for regression."""
    columns: Columns = ()
    """Mapping from the field names that data.format expects to the field names in the records, such as
    ``{prompt: question, completion: answer}`` or ``{messages: chat.turns}``. Any other key adds a column of
    numbers to the batch, such as ``{weight: score}``, which a custom train.loss can read. Such a column
    requires ``data.packing: false``. A list such as ``[weight, score]`` adds columns under their own
    names."""
    text_split: Literal["file", "paragraph", "line"] = "file"
    """Unit of text in a .txt file. The unit matters without packing, because each text is then truncated to
    data.seq_len. file: the entire file. paragraph: a paragraph; blank lines separate paragraphs. line: a
    line."""


def _validate_source_name(name: str) -> str:
    """Validate the name of a source, and return it unchanged.

    A name consists of ASCII letters, digits, - and _, and begins with a letter or a digit. Raises
    ``ValueError`` for any other name.
    """
    if SOURCE_NAME_PATTERN.fullmatch(name) is None:
        raise ValueError(
            "must begin with a letter or digit, and contain only letters, digits, - and _, got "
            f"{name[:60]!r}; rename the source"
        )
    return name


SourceName = Annotated[str, AfterValidator(_validate_source_name)]


class MixedSource(SourceConfig):
    """Entry of ``data.sources``: a source, and how much of it the mixture contains.

    The amount is given as a weight or as a number of epochs.
    """

    name: SourceName
    """Name of the source in logs and files."""
    weight: Weight | None = None
    """Share of the samples, relative to the weights of the other sources."""
    epochs: Epochs | None = None
    """Number of times that the source is read in one pass over the mixture, instead of a weight."""


class Phase(Section):
    """Phase of a mixture: the weights of its sources from one step until the next phase begins."""

    step: Steps
    """First step with these weights."""
    weights: dict[str, Weight]
    """Weights, keyed by the name of the source."""


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
    """Mixture of sources that replaces data.source, such as ``[{name: web, source: web/*.jsonl, weight: 3},
    {name: code, source: code.jsonl, weight: 1}]``. The ``weight`` of a source is its share of the samples,
    relative to the other weights. Instead of weights, you can set ``epochs``, the number of times that a
    source is read in one pass over the mixture (default: 1). A source can also contain any setting marked
    ‡."""
    weight_schedule: Annotated[tuple[Phase, ...], Field(strict=False)] = ()
    """Weights of data.sources that change during the run, such as ``[{step: 9000, weights: {web: 1, code:
    4}}]``. From this step on, the new weights replace all earlier weights."""
    shuffle_window: PartCount = Field(default=1, json_schema_extra=IDENTITY)
    """Number of parts of a stream whose samples are shuffled together (see docs/data.md). A larger window
    shuffles better, but training starts later, because all parts of the window must be tokenized first."""
    cache_limit: Gigabytes | None = None
    """Maximum size of a stream's tokens on disk, in gigabytes. Deleted tokens are computed again when they
    are needed. null: half of the disk space that is free at the start."""
    images: Flag | None = None
    """Whether conversations can contain images, for a model that accepts images. An image is a part of a
    message, such as ``{type: image, path: cat.jpg}``, or is listed in the field ``images`` of the record.
    null: ``true`` if one of the first 1,000 records has an image."""
    image_max_pixels: Pixels | None = None
    """Maximum number of pixels of an image. Larger images are scaled down before they are passed to the
    model's image processor. A smaller number results in fewer tokens. null: only the limits of the image
    processor apply."""
    chat_template: PathText | None = None
    """Chat template that renders a conversation as text: a .jinja file, the name of one of the tokenizer's
    templates, or ``chatml``. It is saved with the tokenizer. null: the default template of the tokenizer."""
    chat_template_kwargs: OpenMapping = Field(default_factory=dict)
    """Additional variables of the chat template, such as ``{enable_thinking: false}``. The variable
    ``strftime_now`` is the date that a template writes as the current date. It is 2025-01-01 by default, so
    that the tokens are always the same."""
    truncation: Literal["end", "start", "drop", "error"] = Field(default="end", json_schema_extra=IDENTITY)
    """Action if a text or a conversation that is not packed is longer than data.seq_len. If truncation
    removes all tokens that count in the loss, the conversation is left out. The run prints how many texts
    were truncated or left out. end: cut off the end. start: cut off the start. drop: leave out the text.
    error: end the run."""
    source_language: str | None = Field(default=None, min_length=1)
    """Language of the input texts (only for seq2seq-lm), as a code of a multilingual tokenizer, such as
    ``eng_Latn`` for NLLB, ``en_XX`` for mBART or ``en`` for M2M100."""
    target_language: str | None = Field(default=None, min_length=1)
    """Language of the target texts (only for seq2seq-lm), as a code of the tokenizer. The saved model
    generates texts in this language."""
    tokenizer: PathText | None = None
    """Hub id or folder of a tokenizer. null: the tokenizer of model.name_or_path. If the model is built from
    model.config, a small byte-pair encoding is trained on the source and cached."""
    added_tokens: Names = Field(default=(), json_schema_extra=IDENTITY)
    """Special tokens to add to the tokenizer, such as the tokens of a chat template. If necessary, the
    embeddings of the model are enlarged. The new rows are drawn around the mean of the other rows, as in
    transformers."""
    vocab_size: VocabularySize | None = None
    """Vocabulary size of the byte-pair encoding that is trained if there is no tokenizer. null: the
    ``vocab_size`` of the model."""
    seq_len: Length = Field(default=256, ge=2, json_schema_extra=IDENTITY)
    """Length of a training sequence, in tokens. The memory for activations grows with it."""
    target_seq_len: Length | None = Field(default=None, ge=2, json_schema_extra=IDENTITY)
    """Length of a target text, in tokens (only for seq2seq-lm). null: same as data.seq_len."""
    packing: Flag | Annotated[Literal["documents"], AnyCase] = Field(default=True, json_schema_extra=IDENTITY)
    """Method of combining texts into sequences. The tasks seq2seq-lm and sequence-classification require
    ``false``. true: concatenate texts into full sequences (only for language models). documents: pack
    complete texts into a sequence without influence on each other (only for causal-lm). false: put one text
    into each sequence, truncated or padded to data.seq_len."""
    eval_fraction: ProperFraction | None = Field(default=None, json_schema_extra=IDENTITY)
    """Fraction of the training data that is held out for evaluation: the end of the concatenated text or,
    without concatenation, a fixed subset of the records. null: 0.01, but at least 16 sequences or records,
    and at most a fifth of the data. 0: nothing is held out."""
    eval: EvaluationSources | None = None
    """Evaluation data: a source such as ``{source: test.jsonl}`` or ``{split: validation}``, or several named
    sources, such as ``{news: {source: news.jsonl}, code: {source: code.jsonl}}``. Each source can contain any
    setting marked ‡. All other settings are the same as for training. null: evaluate on the data that
    data.eval_fraction holds out."""
    num_workers: Processes = 0
    """Number of processes per rank that prepare batches. Raise it if the accelerator waits for data. For a
    stream, it is also the number of tokenizing processes per machine (at least one). 0: each rank prepares
    its own batches."""
    cache_dir: PathText | None = None
    """Folder that caches tokenized data and trained tokenizers. null: the cache folder of the user, which is
    ``$XDG_CACHE_HOME`` or ``~/.cache``."""

    @property
    def sequences_per_sample(self) -> int:
        """Number of sequences in a sample: two for ``data.format: preference``, otherwise one.

        The result is preliminary while ``data.format`` is ``auto``. Samples from custom
        code (format ``samples``) can have more sequences.
        """
        return 2 if self.format == "preference" else 1

    @property
    def max_sequence_length(self) -> int:
        """Larger of ``data.seq_len`` and ``data.target_seq_len``, in tokens."""
        return max(self.seq_len, self.target_seq_len or 0)


class ParameterGroup(Section):
    """Group of parameters with its own learning rate or weight decay."""

    pattern: str = Field(min_length=1)
    """Regular expression that is searched in the names of parameters."""
    learning_rate: LearningRate | None = None
    """Highest learning rate of these parameters. null: train.learning_rate."""
    weight_decay: WeightDecay | None = None
    """Weight decay of these parameters. null: train.weight_decay."""


class TrainConfig(Section):
    """Settings for training: run length, batch sizes, loss, optimizer, learning rate and evaluation."""

    steps: Steps | None = Field(default=200, ge=1, json_schema_extra=IDENTITY)
    """Length of the run and of the learning-rate schedule, in optimizer steps. null: train.epochs sets the
    length."""
    epochs: Epochs | None = Field(default=None, json_schema_extra=IDENTITY)
    """Length of the run and of the learning-rate schedule, in epochs (passes over the data), instead of
    train.steps. null: train.steps sets the length."""
    stop_after: Steps | None = Field(default=None, ge=1)
    """Step after which the run saves a checkpoint and stops early. The same command without this setting
    resumes the run, on this or another machine. null: the run does not stop early."""
    global_batch_size: BatchSize = Field(default=8, json_schema_extra=IDENTITY)
    """Number of sequences per optimizer step, over all ranks and gradient accumulation steps."""
    micro_batch_size: BatchSize | Literal["auto"] = 4
    """Number of sequences per device in one forward pass. Gradients are accumulated until the global batch is
    complete. Lower this number if memory runs out: training gets slower, but the result stays the same. auto:
    try different sizes, and use the largest size that fits. This is not supported on XLA. On a CPU without a
    memory limit (``ulimit -v``), the size is at most 4."""
    learning_rate: LearningRate = Field(default=3e-4, json_schema_extra=IDENTITY)
    """Peak learning rate, which is reached at the end of the warmup."""
    schedule: Annotated[ScheduleKind, OrPlugIn] = Field(default="cosine", json_schema_extra=IDENTITY)
    """Learning-rate schedule after the warmup, or a custom function or class, as ``package.module:name``. The
    capitalized names are DeepSpeed's schedulers. They work on any backend, but ``OneCycle`` and
    ``LRRangeTest`` require the strategy ``zero1``, ``zero2`` or ``zero3``. cosine: cosine decay. linear:
    linear decay. constant: no decay. wsd: constant until the last part of the run, then decay
    (warmup-stable-decay). inverse_sqrt: decay with the inverse square root of the step."""
    schedule_params: OpenMapping = Field(default_factory=dict, json_schema_extra=IDENTITY)
    """Additional parameters of the schedule. ``wsd`` has the parameters ``decay_ratio`` (the part of the run
    with decay, 0.2 by default), ``decay_type`` and ``warmup_type`` (each ``linear``, ``cosine`` or
    ``1-sqrt``). inverse_sqrt has the parameter ``timescale`` (default: the warmup steps). DeepSpeed's
    schedulers have the same parameters as in DeepSpeed; train.learning_rate is the peak of ``OneCycle`` and
    the first rate of ``LRRangeTest``."""
    warmup_steps: Steps | None = Field(default=None, json_schema_extra=IDENTITY)
    """Number of steps in which the learning rate rises from zero to train.learning_rate, linearly unless the
    schedule defines another shape. null: train.warmup_ratio sets the number of steps."""
    warmup_ratio: Fraction | None = Field(default=None, json_schema_extra=IDENTITY)
    """Warmup as a fraction of all steps, rounded up, instead of train.warmup_steps."""
    min_learning_rate_ratio: Fraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Final learning rate of ``cosine``, ``linear`` and ``wsd``, or lowest learning rate of ``inverse_sqrt``,
    as a fraction of train.learning_rate."""
    optimizer: Annotated[Literal["adamw", "adafactor", "adamw_8bit", "sgd", "muon"], OrPlugIn] = Field(
        default="adamw", json_schema_extra=IDENTITY
    )
    """Optimizer, or the import path of any other ``torch.optim.Optimizer``, such as
    ``torch.optim:NAdam(momentum_decay=0.004)``. adamw: fused AdamW with two fp32 moments. adafactor:
    Adafactor with factored moments, which needs little memory. adamw_8bit: AdamW with 8-bit moments, except
    for embeddings, vectors and small matrices. sgd: SGD, whose momentum is the first value of train.betas.
    muon: Muon for the matrices of layers, and ``adamw`` for all other parameters."""
    master_dtype: Literal["fp32", "bf16"] = Field(default="fp32", json_schema_extra=IDENTITY)
    """Dtype of the trained weights, their gradients, and the moments of the optimizer (8-bit moments keep 8
    bits). fp32: 32-bit floating point. bf16: half the memory; for example, ``adamw`` needs 8 bytes per
    parameter instead of 16. The update is computed in fp32 and rounded stochastically. This requires
    ``precision: bf16`` and the optimizer ``adamw`` or adamw_8bit, and is not supported with adapters, ZeRO or
    XLA."""
    betas: Annotated[tuple[ProperFraction, ProperFraction], Field(strict=False)] = Field(
        default=(0.9, 0.95), json_schema_extra=IDENTITY
    )
    """Decay rates of the first and the second moment. For small or noisy batches, raise the second rate
    towards 0.999."""
    eps: Epsilon = Field(default=1e-8, json_schema_extra=IDENTITY)
    """Number that is added to the square root of the second moment to avoid a division by zero."""
    weight_decay: WeightDecay = Field(default=0.1, json_schema_extra=IDENTITY)
    """Weight decay. As in the Trainer of transformers, it does not apply to biases and norms. It is decoupled
    for ``adamw`` and ``muon``, and added to the gradient for ``sgd``."""
    parameter_groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = Field(
        default=(), json_schema_extra=IDENTITY
    )
    """Groups of parameters with their own learning rate or weight decay, such as ``[{pattern: lora_B,
    learning_rate: 5.0e-3}, {pattern: embed_tokens, weight_decay: 0}]``. The ``pattern`` is a regular
    expression that is searched for in the names of parameters. A parameter belongs to the first group that
    matches. The schedule scales the learning rates of all groups by the same factor. The weight decay of a
    group does not apply to biases and norms."""
    max_grad_norm: GradientNorm | None = Field(default=1.0, json_schema_extra=IDENTITY)
    """Maximum global norm of the gradients. If the norm is larger, the gradients are scaled down to this
    norm. null: no clipping."""
    fused_backward: Flag = False
    """Update each parameter during the backward pass, as soon as its gradient is complete, and then free the
    gradient. This saves the memory of the gradients and does not change the result. It requires one
    micro-batch per step, ``train.max_grad_norm: null`` and ``train.on_non_finite: stop``. It is not supported
    with ``muon``, custom optimizers, fp16, offloading, ZeRO or XLA."""
    muon_momentum: ProperFraction = Field(default=0.95, json_schema_extra=IDENTITY)
    """Nesterov momentum of ``muon``."""
    muon_rate: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw", json_schema_extra=IDENTITY
    )
    """Scaling of the learning rate of ``muon`` for a matrix with R rows and C columns, as with
    ``adjust_lr_fn`` in ``torch.optim.Muon``. match_rms_adamw: multiply it by ``0.2 * sqrt(max(R, C))``, so
    that a learning rate tuned for ``adamw`` can be used. original: multiply it by ``sqrt(max(1, R / C))``."""
    adafactor_rule: Literal["torch", "transformers"] = Field(default="torch", json_schema_extra=IDENTITY)
    """Update rule of ``adafactor``. torch: the learning rate is relative to the RMS of a parameter, and is at
    most ``1 / sqrt(step)``. transformers: the learning rate is absolute, as in the Trainer of transformers
    (``scale_parameter`` and ``relative_step`` are false). Use a rate that is 10 to 100 times lower."""
    loss: PlugIn | None = Field(default=None, json_schema_extra=IDENTITY)
    """Loss function: ``dpo``, ``ipo``, ``simpo`` or ``orpo`` if data.format is ``preference``, or a custom
    loss, as ``package.module:name``. Arguments follow in parentheses, such as ``dpo(beta=0.2)``. null:
    cross-entropy or, for sequence-classification, the loss for the ``problem_type`` of the model."""
    label_smoothing: ProperFraction = Field(default=0.0, json_schema_extra=IDENTITY)
    """Share of each target that is spread evenly over all tokens or classes. It does not apply to the
    evaluation loss."""
    z_loss: LossWeight = Field(default=0.0, json_schema_extra=IDENTITY)
    """Weight of the z-loss, the squared logarithm of the softmax normalizer, which keeps the logits from
    drifting. 1e-4 is common for pretraining. It is not part of the evaluation loss."""
    neftune_noise_alpha: NoiseScale = Field(default=0.0, json_schema_extra=IDENTITY)
    """Size of the noise that NEFTune adds to embeddings in training, scaled by the length of each document. 5
    is common for fine-tuning on conversations. 0: no noise."""
    dropout: Flag | None = Field(default=None, json_schema_extra=IDENTITY)
    """Whether dropout is active in training, including the dropout of an adapter. null: inactive for
    preference losses, as in TRL, and active for all other losses."""
    trainable: Names | None = Field(default=None, json_schema_extra=IDENTITY)
    """Regular expressions of the parameters to train. Only parameters whose names contain a match are
    trained, for example with ``lm_head``, or with ``layers\\.(30|31)\\.`` for two layers. All other
    parameters are frozen: they do not change, and have no gradient and no optimizer state. null: all
    parameters are trained."""
    frozen: Names = Field(default=(), json_schema_extra=IDENTITY)
    """Regular expressions of the parameters to freeze, such as ``embed_tokens``. Parameters whose names
    contain a match are frozen, even if train.trainable matches as well."""
    ema: AverageDecay | None = Field(default=None, json_schema_extra=IDENTITY)
    """Decay of an exponential moving average (EMA) of the weights, such as 0.999. The average is computed in
    fp32 and saved in checkpoints. To export it, set checkpoint.export_ema. null: no average."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """Action if the loss or a gradient is NaN or infinite. The update is always skipped, so that weights and
    optimizer state do not change. An overflow in fp16 only lowers the loss scale. stop: end the run, and
    report the step, its samples and how to find the cause (``--replay``). skip: continue, and count the step
    in ``skipped_steps``. The run ends after ten such steps in a row."""
    eval_every: Interval | None = 100
    """Number of steps between evaluations. null: evaluate only at the end."""
    eval_every_epochs: Epochs | None = None
    """Number of epochs between evaluations, instead of train.eval_every. For example, 0.5 evaluates in the
    middle and after the last step of each epoch."""
    eval_batches: Interval | None = None
    """Maximum number of global batches in one evaluation. null: all evaluation data."""
    eval_ema: Flag = False
    """Evaluate the moving average of the weights (train.ema) instead of the weights."""
    metrics: Annotated[tuple[str, ...], OneOrMany, Field(strict=False)] | None = None
    """Metrics of an evaluation in addition to the loss. Language models have ``perplexity`` and ``accuracy``,
    and for seq2seq-lm also ``exact_match`` and ``rouge_l`` of generated texts. Classifiers have ``accuracy``,
    ``f1`` and, with one class per text, ``confusion``. Regressions have ``mse``, ``mae`` and ``r2``. A custom
    function or class is also possible, as ``package.module:name``. null: all metrics of the task that do not
    generate text, or no metrics if train.loss is set. []: only the loss."""
    early_stopping_patience: Interval | None = None
    """Number of evaluations in a row without an improvement of checkpoint.best_metric after which the run
    ends. null: no early stopping."""
    early_stopping_threshold: Threshold = 0.0
    """Minimum difference from the best evaluation so far that counts as an improvement."""
    callbacks: Annotated[tuple[PlugIn, ...], OneOrMany, Field(strict=False)] = ()
    """Custom callbacks, as ``package.module:name`` or ``package.module:name(argument=value)``. They are
    called at the start, after steps, logs, evaluations and saves, and at the end."""

    @property
    def has_frozen_patterns(self) -> bool:
        """Whether ``train.trainable`` or ``train.frozen`` is set."""
        return self.trainable is not None or bool(self.frozen)


class MemoryConfig(Section):
    """Options that save memory at the cost of speed. They do not change the result of the training."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in the backward pass instead of storing them. none: store all activations. full:
    recompute every layer, which needs the least memory, but is about a third slower. selective: recompute
    everything except the results of expensive operations."""
    offload_activations: Flag = False
    """Keep the activations of layers in host memory between the forward and the backward pass. The copies
    overlap with the computation. With activation checkpointing, only the inputs of layers are stored, so only
    these are offloaded. This is not supported on TPUs. With ``compile: true``, it also requires activation
    checkpointing."""
    loss_chunk_tokens: ChunkTokens | Literal["auto"] = "auto"
    """Maximum number of tokens whose logits are in memory at once. The loss of a larger micro-batch is
    computed in chunks, and recomputed in the backward pass. Only for FSDP and DDP. auto: as many tokens as
    have 64 million logits (256 MiB). 0: all tokens at once."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Memory in which the optimizer state is stored and updated. Offloading is slower. none: the memory of
    the device. cpu: host memory. nvme: a local disk (memory.nvme_path)."""
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """Memory in which sharded parameters are stored while they are not in use. With FSDP, this also offloads
    the optimizer state and the update. Offloading parameters is the slowest option. none: the memory of the
    device. cpu: host memory. nvme: a local disk (memory.nvme_path)."""
    nvme_path: PathText | None = None
    """Folder on a fast local disk, for offloading to ``nvme``."""

    @property
    def has_offloading(self) -> bool:
        """Whether the optimizer state or the parameters are offloaded from the devices."""
        return (self.offload_optimizer, self.offload_params) != ("none", "none")


class FsdpConfig(Section):
    """Settings of FSDP, named as in Accelerate. On XLA, only fsdp.shard_group_size is supported."""

    shard_group_size: Ranks | None = None
    """Number of ranks (on XLA: devices) that share one sharded copy of the state with the strategies
    ``hybrid_shard`` and ``hybrid_shard_zero2``. null: the ranks of one node (on XLA: the devices of one
    slice)."""
    auto_wrap_policy: (
        Annotated[Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"], AnyCase] | None
    ) = None
    """Modules that are sharded and gathered as a unit. transformer_based_wrap: each transformer layer.
    size_based_wrap: each module with at least fsdp.min_num_params parameters. no_wrap: the entire model.
    null: ``size_based_wrap`` if fsdp.min_num_params is set, otherwise ``transformer_based_wrap``."""
    transformer_layer_cls_to_wrap: Names | None = None
    """Class names of the layers for ``transformer_based_wrap``. null: the transformer layers of the model."""
    min_num_params: ModuleSize | None = None
    """Minimum number of parameters of a module that ``size_based_wrap`` makes a unit."""
    forward_prefetch: Flag | None = None
    """Gather the parameters of the next unit during the forward pass of the current unit. More communication
    overlaps with computation, but more memory is needed. null: same as ``false``."""
    backward_prefetch: Annotated[Literal["backward_pre", "backward_post", "no_prefetch"], AnyCase] | None = (
        None
    )
    """When the parameters of the next unit are gathered in the backward pass. backward_pre: before the
    gradients of the current unit are computed, so that the most communication overlaps with computation.
    backward_post, no_prefetch: after the gradients of the current unit are computed, which needs less memory.
    In FSDP2, both modes are the same. null: same as backward_pre."""


class Fp16Config(Section):
    """Dynamic loss scaling for fp16, with settings named as in DeepSpeed."""

    initial_scale_power: ScalePower = 16
    """Exponent of the initial loss scale, which is a power of 2 (16 means 65,536). Lower it if the first
    updates are skipped."""
    loss_scale_window: Interval = 1000
    """Number of updates in a row without an overflow after which the loss scale is doubled."""
    hysteresis: Interval = 2
    """Number of overflows since the last doubling after which the loss scale is halved. 1: every overflow
    halves the loss scale."""
    min_loss_scale: LossScale = 1.0
    """Minimum loss scale. The run ends if gradients overflow at this loss scale."""


class DeepSpeedConfig(Section):
    """DeepSpeed's own settings, for the ZeRO strategies."""

    config: PathText | OpenMapping | None = None
    """A DeepSpeed JSON file, or its content as a mapping. Each ``auto`` in the JSON is replaced by the value
    from this config. Values in the JSON replace the settings that you did not set. If a value in the JSON
    contradicts a setting that you did set, the run ends with an error. null: no DeepSpeed JSON."""


class XlaConfig(Section):
    """Settings of the XLA backend."""

    buffer_dtype: XlaDtype | None = None
    """Dtype of the model's floating-point buffers in the computation. null: each buffer keeps its dtype."""
    shard_param_on_dim_0: Flag | None = None
    """Shard every parameter along its first dimension, even if another dimension is longer. null: same as
    ``false``."""
    optimization_barrier_in_backward: Flag | None = None
    """Prevent the compiler from merging the gathers of different units in the backward pass. null: same as
    ``false``."""
    sharding: dict[str, Dimension | None] | None = None
    """Mapping from regular expressions for parameter names to the dimension along which to shard these
    parameters, or to ``null`` to replicate them. The first match counts. Parameters without a match are
    sharded as usual. null: all parameters are sharded as usual."""
    scan_layers: Flag = False
    """Compile identical layers once and run them in a loop, so that the compile time does not grow with the
    number of layers."""
    attention_rows: Length | None = None
    """Compute attention for this many tokens of a sequence at once. Only the attention scores of these tokens
    are in memory, and they are recomputed in the backward pass. null: all tokens at once."""
    compilation_cache: PathText = "auto"
    """Folder that caches compiled graphs. auto: on a TPU, a folder in the cache of the user; on virtual
    devices, no cache, because their graphs cannot be cached. none: no cache."""


class CheckpointConfig(Section):
    """Settings for saving checkpoints, resuming from them, and exporting the trained model."""

    every_steps: Interval | None = 100
    """Number of steps between checkpoints. null: save a checkpoint only when the run stops."""
    every_epochs: Epochs | None = None
    """Number of epochs between checkpoints, instead of checkpoint.every_steps."""
    keep: Interval | None = 3
    """Number of newest checkpoints to keep. Older checkpoints are deleted. null: keep all checkpoints."""
    keep_best: Interval | None = None
    """Number of best checkpoints to keep in addition to the newest checkpoints, ranked by
    checkpoint.best_metric. If an evaluation is among the best so far, a checkpoint is saved after it. null:
    keep only the newest checkpoints."""
    best_metric: str | None = Field(default=None, min_length=1)
    """Metric that ranks checkpoints, named as in ``metrics.jsonl``, such as ``eval_accuracy``, or
    ``eval_loss/news`` for the source ``news``. null: the ``eval_loss`` of the first source."""
    best_mode: Literal["auto", "min", "max"] = "auto"
    """Whether a lower or a higher value of checkpoint.best_metric is better. auto: depends on the metric; a
    custom metric can define ``higher_is_better``. min: a lower value is better. max: a higher value is
    better."""
    async_: Flag = Field(default=True, alias="async")
    """Write checkpoints in the background, from a copy of the state in host memory. false: training waits
    until a checkpoint is on disk, and no copy is needed."""
    resume: PathText = "auto"
    """Checkpoint to start from if output_dir contains no checkpoints, as a path or URL. It can be a
    checkpoint of another program (see docs/moving.md). auto: resume from the newest complete checkpoint in
    output_dir, if there is one. never: raise an error if output_dir already contains checkpoints."""
    allow_changes: Flag = False
    """Resume the run in output_dir even if settings of the optimizer or the schedule have changed, such as
    train.learning_rate. An increase of train.steps or train.epochs is always allowed."""
    resume_step: Steps | None = None
    """Number of optimizer steps that count as completed if checkpoint.resume is a path, such as a checkpoint
    of another program. The schedule continues from this step, and 0 restarts it. null: the step that the
    checkpoint contains."""
    resume_samples: Samples | None = None
    """Number of sequences that count as consumed if checkpoint.resume is a path, such as a checkpoint of
    another program. The order of the data continues from this number. null: the number that the checkpoint
    contains, or its steps times train.global_batch_size."""
    export: Flag | Literal["merged", "like_base"] = True
    """Model to write into ``<output_dir>/final`` at the end of the run, as safetensors for
    ``from_pretrained``. true: the model or, if an adapter is trained, only the adapter in peft's format.
    false: no model. merged: the model, with the adapter merged into it. like_base: the model, quantized like
    model.name_or_path, with an adapter merged into it."""
    export_best: Flag = False
    """Write ``<output_dir>/final`` from the best checkpoint instead of the last."""
    export_ema: Flag = False
    """Write ``<output_dir>/final`` from the moving average of the weights (train.ema) instead of the
    weights."""
    staging_dir: PathText | None = None
    """Local folder for files before their upload, if output_dir is a URL. The folder needs space for the part
    of a checkpoint that this machine writes. null: the temporary folder of the system."""
    max_outage_minutes: Minutes = 60.0
    """Number of minutes for which saves may fail, because the object store does not answer, before the run
    ends (only if output_dir is a URL). Until then, training continues, and each save tries again."""


class LogConfig(Section):
    """Settings for logs, metric trackers, and the sample text generated at the end of the run."""

    every_steps: Interval = 10
    """Number of steps between log lines on the console and in ``metrics.jsonl``. Each log line synchronizes
    the host with the device."""
    hang_timeout: Seconds | None = 480.0
    """Number of seconds without a new batch after which every rank writes its stack traces to
    ``<output_dir>/hang/`` and exits. The first batch may take four times as long. null: no limit."""
    memory_snapshot: Flag = False
    """Record allocations of GPU memory. If memory runs out, they are written to ``<output_dir>/memory/`` for
    https://pytorch.org/memory_viz. This costs a few percent of speed, and is only supported on GPUs."""
    trackers: Annotated[tuple[Tracker, ...], OneOrMany, Field(strict=False)] = ("tensorboard",)
    """Trackers that receive the metrics, in addition to ``metrics.jsonl``. Every tracker except
    ``tensorboard`` needs its own package. A custom tracker is a class with the methods of
    ``accelerate.tracking.GeneralTracker``, as ``package.module:name``. []: no trackers."""
    project: str | None = Field(default=None, min_length=1)
    """Project of the run in trackers. null: the value of ``WANDB_PROJECT`` (or of the variable of another
    tracker), otherwise the name of the folder that contains output_dir."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run in trackers. All launches of a run appear as one run. null: the last part of
    output_dir."""
    sample_prompt: str | None = Field(default=None, min_length=1)
    """Prompt from which a generative model generates text at the end of the run. null: the start of a
    held-out text."""
    sample_tokens: GeneratedTokens = 64
    """Number of tokens to generate from log.sample_prompt at the end of the run. 0: no text is generated."""
    quiet: Flag = False
    """Print only warnings and errors, like the flag ``--quiet``. Everything else is still written to
    ``log.txt`` in output_dir."""


class HubConfig(Section):
    """Settings for uploading exported models to the Hugging Face Hub."""

    push: Literal["end", "checkpoints"] | None = None
    """Files to upload. Optimizer state and data are never uploaded. The access token comes from ``HF_TOKEN``
    or ``hf auth login``. end: ``<output_dir>/final`` with a model card, at the end of the run. checkpoints:
    also the export of every checkpoint, each as a commit. null: no files."""
    repo: str | None = Field(default=None, min_length=1)
    """Repository to upload to, such as ``organization/name``. It is created if it does not exist. null: the
    last part of output_dir, in the namespace of the user to whom the token belongs."""
    private: Flag = True
    """Create a private repository, and refuse to upload to a public repository. false: create a public
    repository. The visibility of an existing repository does not change."""
