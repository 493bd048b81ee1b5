"""The sections of the configuration, one class each.

Every ``description`` says what a setting does, in which unit, and when to change it: help, the reference page
and editors show it. Fields marked ``IDENTITY`` define the run; all others may change between two legs of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from portable.config.types import IDENTITY, AnyCase, Flag, Names, OneOrMany, OpenMapping, PathText, Section
from portable.optim.schedule import Kind as ScheduleKind  # noqa: TC001  (read when the class is made)

Task = Literal["causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification"]
Tracker = Literal["tensorboard", "wandb", "trackio", "swanlab"]
XlaDtype = Literal["float32", "bfloat16", "float16"]
Beta = Annotated[float, Field(ge=0, lt=1)]


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

    name_or_path: PathText | None = Field(
        default=None,
        description="Hub id or local folder of a transformers model; its weights are where training starts. "
        "Leave it null to build model.config from scratch.",
        json_schema_extra=IDENTITY,
    )
    config: OpenMapping | None = Field(
        default_factory=_quickstart_model,
        description="Config of a model to build with random weights: model_type and whatever keys that "
        "model's transformers config takes. Given in a file, it replaces the default as a whole; a flag such "
        "as --model.config.hidden_size 512 changes one key. Not together with model.name_or_path.",
        json_schema_extra=IDENTITY,
    )
    task: Task = Field(
        default="causal-lm",
        description="What the model learns: the next token (causal-lm), masked tokens (masked-lm), a target "
        "text from a source text (seq2seq-lm), or a label (sequence-classification).",
        json_schema_extra=IDENTITY,
    )
    init: Literal["pretrained", "scratch"] = Field(
        default="pretrained",
        description="With model.name_or_path: start from its weights (pretrained), or keep only its "
        "architecture and draw random weights (scratch). Without it there are no weights to load, and the "
        "model is always built from scratch.",
        json_schema_extra=IDENTITY,
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        default="sdpa",
        description="Attention kernel: PyTorch's fused one (sdpa), the plain formula (eager, slow; for "
        "comparing), or the flash-attn package (flash_attention_2; CUDA, bf16 or fp16).",
    )
    trust_remote_code: Flag = Field(
        default=False,
        description="Run Python code that the model's repository brings along. Only for repositories whose "
        "code you have read.",
    )

    @property
    def from_scratch(self) -> bool:
        """Whether training starts from random weights."""
        return self.name_or_path is None or self.init == "scratch"


class DataConfig(Section):
    """What it learns from."""

    # Where the text lies and what its fields are called may differ between machines, so neither is part of
    # the run's identity: that it is the same text is held by a digest of its tokens, which checkpoints keep.

    source: PathText | Annotated[tuple[PathText, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None,
        description="A hub dataset, or a file, glob or list of files (.txt .jsonl .json .csv .parquet), here "
        "or by URL. Null: the source text of this machine's Python standard library, which needs no "
        "download.",
    )
    config_name: str | None = Field(
        default=None,
        description="Configuration of the hub dataset, where it has several (as wikitext-2-raw-v1).",
    )
    split: str = Field(
        default="train",
        min_length=1,
        description="Split of the hub dataset to train on; slices such as train[:10%] work.",
    )
    max_samples: int | None = Field(
        default=None,
        ge=1,
        description="Use at most this many records of the source, from its start. Null: all. For trying a "
        "config on a large dataset.",
    )
    text_field: str = Field(
        default="text",
        min_length=1,
        description="Field of a record that holds its text. A dot goes into a field that holds fields: "
        "translation.en. So for the fields below.",
    )
    text_pair_field: str | None = Field(
        default=None,
        min_length=1,
        description="Field that holds the second text of a pair (sequence-classification): the hypothesis to "
        "a premise, the answer to a question. Both are cut together to data.seq_len, the longer one first.",
    )
    target_field: str = Field(
        default="target",
        min_length=1,
        description="Field that holds the text to produce (seq2seq-lm).",
    )
    source_prefix: str = Field(
        default="",
        description="What every text begins with, such as 'summarize: ' for a T5 (seq2seq-lm).",
    )
    label_field: str = Field(
        default="label",
        min_length=1,
        description="Field that holds the label (sequence-classification): a class (an integer or a string), "
        "a list of classes, or what a regression learns, numbers with a fraction.",
    )
    text_split: Literal["file", "paragraph", "line"] = Field(
        default="file",
        description="What of a .txt file is one text: all of it, a paragraph (blank lines part them), or a "
        "line. Matters where texts are not packed, and each is cut at data.seq_len.",
    )
    source_language: str | None = Field(
        default=None,
        min_length=1,
        description="Language of the texts, as the tokenizer of a model of many languages calls it (eng_Latn "
        "for NLLB, en_XX for mBART, en for M2M100). For seq2seq-lm.",
    )
    target_language: str | None = Field(
        default=None,
        min_length=1,
        description="Language of the texts to produce, called the same way. The saved model then begins to "
        "write in it.",
    )
    tokenizer: PathText | None = Field(
        default=None,
        description="Hub id or folder of a tokenizer. Null: the tokenizer of model.name_or_path, or, for a "
        "model built from scratch, a small byte-pair encoding trained on the source, once, and cached.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=300,
        description="Tokens in the byte-pair encoding that is trained when there is no tokenizer. Null: the "
        "vocab_size of the model.",
    )
    seq_len: int = Field(
        default=256,
        ge=2,
        description="Length of a training sequence in tokens. Memory for activations grows with it.",
        json_schema_extra=IDENTITY,
    )
    target_seq_len: int | None = Field(
        default=None,
        ge=2,
        description="Length of a text to produce, in tokens (seq2seq-lm). Null: data.seq_len.",
        json_schema_extra=IDENTITY,
    )
    packing: Flag = Field(
        default=True,
        description="Join texts end to end into full sequences, so that no token is padding (language models "
        "only). False: one text a sequence, cut or padded to data.seq_len; seq2seq-lm and "
        "sequence-classification always do that.",
        json_schema_extra=IDENTITY,
    )
    eval_fraction: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share held out for evaluation: the end of the packed text, or, where texts are not "
        "packed, a fixed choice of records. 0: none, and no evaluation.",
        json_schema_extra=IDENTITY,
    )
    num_workers: int = Field(
        default=0,
        ge=0,
        description="Processes that prepare batches for each rank. 0 prepares them in the rank itself; raise "
        "it when the accelerator waits for data.",
    )
    cache_dir: PathText | None = Field(
        default=None,
        description="Where tokenised data and trained tokenizers are kept between runs. Null: the user's "
        "cache folder ($XDG_CACHE_HOME, or ~/.cache).",
    )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, of texts and targets."""
        return max(self.seq_len, self.target_seq_len or 0)

    @property
    def sources(self) -> tuple[str, ...]:
        """``source`` as a tuple, empty where it is null."""
        if self.source is None:
            return ()
        return (self.source,) if isinstance(self.source, str) else self.source


class TrainConfig(Section):
    """How long, how much at a time, and by which rule the weights move."""

    steps: int | None = Field(
        default=200,
        ge=1,
        description="Length of the schedule in optimizer steps. Null only where train.epochs gives it.",
        json_schema_extra=IDENTITY,
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="Length of the schedule in passes over the data, in place of train.steps.",
        json_schema_extra=IDENTITY,
    )
    stop_after: int | None = Field(
        default=None,
        ge=1,
        description="Save a checkpoint and stop after this step of the schedule; the same command without it "
        "goes on from there. For cutting a run into legs, also on different machines.",
    )
    global_batch_size: int = Field(
        default=8,
        ge=1,
        description="Sequences in one optimizer step, over all ranks together. Part of what the run is: it "
        "stays the same on any number of devices.",
        json_schema_extra=IDENTITY,
    )
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=4,
        description="Sequences that one device holds at a time; gradients accumulate up to the global batch. "
        "Lower it when memory runs out, which changes speed and nothing else. auto: the largest that fits, "
        "found by trying a few and kept while the run goes on under the same settings; on a CPU without a "
        "memory limit (ulimit -v) up to 4; not on XLA. Left out, it is lowered to a divisor of the global "
        "batch.",
    )
    optimizer: Literal["adamw", "adafactor", "adamw_8bit", "sgd"] = Field(
        default="adamw",
        description="adamw (fused; two fp32 moments a parameter), adafactor (moments as rows and columns, "
        "little memory), adamw_8bit (moments in 8 bits, a quarter of the memory; in 32 bits those of "
        "embeddings, vectors and small matrices), or sgd (momentum is the first of train.betas).",
        json_schema_extra=IDENTITY,
    )
    adafactor_rule: Literal["torch", "transformers"] = Field(
        default="torch",
        description="Which library's formula adafactor goes by. torch: the rate is a share of a parameter's "
        "root mean square, and at most one over the root of the steps. transformers: the rate is taken as it "
        "is, as optim adafactor of the Trainer has it (scale_parameter and relative_step false); it wants "
        "one that is 10 to 100 times lower.",
        json_schema_extra=IDENTITY,
    )
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95),
        description="Decay rates of the first and second moment. Raise the second towards 0.999 for small or "
        "noisy batches.",
        json_schema_extra=IDENTITY,
    )
    eps: float = Field(
        default=1e-8,
        gt=0,
        description="Added to the root of the second moment, so that no division is by zero.",
        json_schema_extra=IDENTITY,
    )
    learning_rate: float = Field(
        default=3e-4,
        gt=0,
        description="Highest learning rate, reached at the end of the warm-up.",
        json_schema_extra=IDENTITY,
    )
    min_learning_rate_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Where cosine and linear end, as a share of train.learning_rate; 0.1 is common for "
        "pretraining.",
        json_schema_extra=IDENTITY,
    )
    schedule: ScheduleKind = Field(
        default="cosine",
        description="How the learning rate falls after the warm-up. The names in capitals are DeepSpeed's "
        "schedulers, step by step the same, on any backend.",
        json_schema_extra=IDENTITY,
    )
    schedule_params: OpenMapping = Field(
        default_factory=dict,
        description="What one of DeepSpeed's schedules takes besides, under its names (warmup_type, "
        "cycle_min_lr ...). Rates, warm-up and length come from the settings around this one; for OneCycle "
        "train.learning_rate is the top of the cycle, for LRRangeTest where the rise begins.",
        json_schema_extra=IDENTITY,
    )
    warmup_steps: int = Field(
        default=20,
        ge=0,
        description="Steps over which the learning rate rises from zero, in a straight line unless the "
        "schedule says otherwise. Left out, at most a tenth of train.steps.",
        json_schema_extra=IDENTITY,
    )
    warmup_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="The warm-up as a share of all steps, rounded up, in place of train.warmup_steps.",
        json_schema_extra=IDENTITY,
    )
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Weight decay of all that is neither a bias nor of a norm, as in the Trainer. Decoupled "
        "for adamw, added to the gradient for sgd.",
        json_schema_extra=IDENTITY,
    )
    max_grad_norm: float | None = Field(
        default=1.0,
        gt=0,
        description="Gradients whose global norm exceeds this are scaled down to it. Null: no clipping.",
        json_schema_extra=IDENTITY,
    )
    on_non_finite: Literal["stop", "skip"] = Field(
        default="stop",
        description="What a loss or gradient that is not finite leads to. The update is not made in any "
        "case: weights and optimizer stay bit for bit what they were. stop: the run ends and says which step "
        "and samples it was, and how to look into it (--replay). skip: it goes on with the next step, "
        "schedule and data moved on, counts it as skipped_steps, and ends after ten in a row. Under fp16 "
        "an overflow belongs to the search for a loss scale (section fp16), whatever this says.",
    )
    eval_every: int | None = Field(
        default=100,
        ge=1,
        description="Steps between evaluations on the held-out records. Null: only at the end.",
    )
    eval_every_epochs: float | None = Field(
        default=None,
        gt=0,
        description="Passes over the data between evaluations, in place of train.eval_every: 1 evaluates "
        "after the step that ends an epoch, 0.5 in its middle as well.",
    )
    eval_batches: int | None = Field(
        default=None,
        ge=1,
        description="Evaluate on at most this many global batches. Null: on all held-out records.",
    )


class MemoryConfig(Section):
    """Trading speed for memory; none of it changes what is learned."""

    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        default="none",
        description="Recompute activations in the backward pass in place of keeping them: of every layer "
        "(full, about a third slower, least memory), or of all but the costly operations (selective).",
    )
    loss_chunk_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="Tokens whose logits are held at a time; a micro-batch with more gets its loss in parts, "
        "and computes the logits again in the backward pass. auto: as many as have 64 million logits "
        "(256 MiB), so that only large vocabularies are cut up. 0: all at once. FSDP and DDP only.",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = Field(
        default="none",
        description="Keep optimizer state in host memory (cpu) or on a local disk (nvme), where it is also "
        "updated. For models whose state does not fit the devices; the step gets slower.",
    )
    offload_params: Literal["none", "cpu", "nvme"] = Field(
        default="none",
        description="Keep sharded parameters in host memory (cpu) or on a local disk (nvme) between uses; "
        "under FSDP that takes the optimizer's state and its step along. The last resort, and the slowest.",
    )
    nvme_path: PathText | None = Field(
        default=None, description="Folder on a fast local disk for what is offloaded to nvme."
    )

    @property
    def offloads(self) -> bool:
        """Whether anything leaves the devices."""
        return (self.offload_optimizer, self.offload_params) != ("none", "none")


class FsdpConfig(Section):
    """Details of FSDP, under the names that Accelerate uses. Null leaves the choice to the backend."""

    shard_group_size: int | None = Field(
        default=None,
        ge=1,
        description="Ranks (on XLA: devices) that share one copy of the state under hybrid_shard and "
        "hybrid_shard_zero2. Null: the ranks of one node (on XLA: the devices of one slice).",
    )
    auto_wrap_policy: (
        Annotated[Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"], AnyCase] | None
    ) = Field(
        default=None,
        description="What becomes one unit of sharding: each transformer layer, each module of at least "
        "fsdp.min_num_params parameters, or the whole model. Null: each transformer layer.",
    )
    transformer_layer_cls_to_wrap: Names | None = Field(
        default=None,
        description="Class names of the layers that transformer_based_wrap wraps. Null: those that the model "
        "declares.",
    )
    min_num_params: int | None = Field(
        default=None, ge=0, description="Smallest module, in parameters, that size_based_wrap wraps."
    )
    forward_prefetch: Flag | None = Field(
        default=None,
        description="Gather the next unit's parameters while the present one computes its forward pass: "
        "more overlap, more memory.",
    )
    backward_prefetch: Annotated[Literal["backward_pre", "backward_post", "no_prefetch"], AnyCase] | None = (
        Field(
            default=None,
            description="When the backward pass gathers the next unit: before this unit's gradients "
            "(backward_pre, most overlap; the default), or after them (backward_post and no_prefetch, which "
            "FSDP2 does not tell apart: less memory).",
        )
    )


class Fp16Config(Section):
    """How precision fp16 searches for its loss scale, under the names of DeepSpeed's fp16 section."""

    initial_scale_power: int = Field(
        default=16,
        ge=0,
        le=32,
        description="The search begins at 2 to this power. Lower it to save the updates that are left out "
        "at the start.",
    )
    loss_scale_window: int = Field(
        default=1000, ge=1, description="Updates without an overflow after which the scale is doubled."
    )
    hysteresis: int = Field(
        default=2,
        ge=1,
        description="Overflows, since it was doubled last, of which the last halves the scale. 1: each.",
    )
    min_loss_scale: float = Field(
        default=1.0,
        gt=0,
        description="Lowest scale. Gradients that overflow even there end the run.",
    )


class DeepSpeedConfig(Section):
    """DeepSpeed's own settings, for the strategies zero1, zero2 and zero3."""

    config: PathText | OpenMapping | None = Field(
        default=None,
        description="A DeepSpeed JSON file, or its content as a mapping. Its auto values are filled in from "
        "this config; a value left at its default here yields to the JSON, and one set here that differs "
        "from the JSON is an error.",
    )


class XlaConfig(Section):
    """Details of sharding on XLA, under the names of xla_fsdp_settings. Null leaves it to the backend."""

    compute_dtype: XlaDtype | None = Field(
        default=None, description="Type that layers compute in. Null: what precision says."
    )
    buffer_dtype: XlaDtype | None = Field(default=None, description="Type of buffers in the computation.")
    fp32_reduce_scatter: Flag | None = Field(
        default=None, description="Sum gradients in float32, whatever type the layers compute in."
    )
    reshard_after_forward: Flag | None = Field(
        default=None, description="Free gathered parameters after the forward pass and gather them again."
    )
    disable_reshard_on_root: Flag | None = Field(
        default=None,
        description="Keep the parameters of the outermost module gathered after the forward pass.",
    )
    flatten_parameters: Flag | None = Field(
        default=None, description="Lay all parameters of a unit out as one flat tensor."
    )
    shard_param_on_dim_0: Flag | None = Field(
        default=None, description="Shard each parameter along its first dim rather than flattened."
    )
    pin_layout_in_collective_ops: Flag | None = Field(
        default=None, description="Fix the memory layout of tensors in collectives across devices."
    )
    execute_sharding_on_init: Flag | None = Field(
        default=None,
        description="Shard each unit as soon as it is built, which lowers the peak of host memory.",
    )
    optimization_barrier_in_forward: Flag | None = Field(
        default=None,
        description="Keep the compiler from merging the gathers of different units in the forward pass.",
    )
    optimization_barrier_in_backward: Flag | None = Field(
        default=None,
        description="Keep the compiler from merging the gathers of different units in the backward pass.",
    )
    auto_wrap_policy: Annotated[
        Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None, AnyCase
    ] = Field(
        default=None, description="What becomes one unit, as fsdp.auto_wrap_policy; wins over it on XLA."
    )
    xla_fsdp_v2: Literal[True] | None = Field(
        default=None,
        description="Shard by SPMD (FSDPv2). The only way here, so that true is the one value allowed.",
    )
    xla_fsdp_grad_ckpt: Flag | None = Field(
        default=None,
        description="Recompute every unit's activations in the backward pass, as "
        "memory.activation_checkpointing: full does.",
    )
    sharding: dict[str, Annotated[int, Field(ge=0)] | None] | None = Field(
        default=None,
        description="Which dim of a parameter is cut over the devices, where the built-in choice does not "
        "fit: regular expressions, searched for in parameter names, and a dim each, or null to keep the "
        "parameter whole. The first that is found counts.",
    )
    compilation_cache: PathText = Field(
        default="auto",
        description="Folder that keeps compiled graphs for the next start, or none. auto: on a TPU a folder "
        "in the user's cache; on virtual devices none, as their graphs cannot be kept.",
    )


class CheckpointConfig(Section):
    """What is saved, and what a run starts from."""

    every_steps: int | None = Field(
        default=100, ge=1, description="Steps between checkpoints. Null: only when the run stops."
    )
    every_epochs: float | None = Field(
        default=None,
        gt=0,
        description="Passes over the data between checkpoints, in place of checkpoint.every_steps: 1 saves "
        "after the step that ends an epoch.",
    )
    keep: int | None = Field(
        default=3, ge=1, description="Newest checkpoints to keep; older ones are deleted. Null: all."
    )
    async_: Flag = Field(
        default=True,
        alias="async",
        description="Write while training goes on, from a copy of the state in host memory. False: wait for "
        "the disk, without that copy.",
    )
    resume: PathText = Field(
        default="auto",
        description="auto: go on from the newest complete checkpoint in output_dir, if there is one. never: "
        "refuse a folder that holds checkpoints. Or the path or URL of a checkpoint to begin at, this "
        "program's or another's (docs/moving.md); once output_dir holds checkpoints, the run goes on from "
        "the newest.",
    )
    resume_step: int | None = Field(
        default=None,
        ge=0,
        description="Optimizer steps that count as done at the checkpoint of another program, to which "
        "checkpoint.resume is the path: where the schedule goes on. 0 begins the schedule anew. Null: what "
        "the checkpoint says itself.",
    )
    resume_samples: int | None = Field(
        default=None,
        ge=0,
        description="Sequences that count as consumed there: where this run's own order of the data goes on. "
        "Null: what the checkpoint says itself, or its steps times train.global_batch_size.",
    )
    staging_dir: PathText | None = Field(
        default=None,
        description="Where output_dir is a URL: a folder of this machine for the shards that it writes and "
        "then uploads, with room for its share of one checkpoint. Null: in the system's folder for temporary "
        "files.",
    )
    export: Flag = Field(
        default=True,
        description="At the end, write plain safetensors into <output_dir>/final for from_pretrained.",
    )

    @property
    def saves_on_the_way(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.every_steps is not None or self.every_epochs is not None


class LogConfig(Section):
    """What is reported while it runs."""

    every_steps: int = Field(
        default=10,
        ge=1,
        description="Steps between lines in metrics.jsonl and on the console. Each one waits for the device.",
    )
    hang_timeout: float | None = Field(
        default=480.0,
        gt=0,
        description="Seconds without a new batch after which a rank is given up: every rank writes where it "
        "stands to <output_dir>/hang/ and ends. The first batch, for which programs are compiled, may take "
        "four times as long; saves are not counted. Null: wait for ever.",
    )
    memory_snapshot: Flag = Field(
        default=False,
        description="Record where GPU memory is allocated, and write it to <output_dir>/memory/ when memory "
        "runs out, for https://pytorch.org/memory_viz. Costs a few percent of speed. GPUs only.",
    )
    trackers: Annotated[tuple[Tracker, ...], OneOrMany, Field(strict=False)] = Field(
        default=("tensorboard",),
        description="Trackers that get the metrics besides metrics.jsonl; [] for none. Each but tensorboard "
        "needs its own package.",
    )
    sample_prompt: str | None = Field(
        default=None,
        min_length=1,
        description="Text that the model continues at the end of the run (generating models). Null: the "
        "beginning of a held-out text.",
    )
    sample_tokens: int = Field(
        default=64, ge=0, description="Tokens to generate in that sample. 0: no sample."
    )
