"""The whole configuration of a run, typed: flags, YAML, JSON Schema and the reference page come from here.

The defaults are the quickstart: a Llama of four million parameters learning the source text of the Python
standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from portable.config import keys, rules
from portable.config.problems import build
from portable.config.sections import (
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    Fp16Config,
    FsdpConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    TrainConfig,
    XlaConfig,
)
from portable.config.types import IDENTITY, Flag, PathText, Section
from portable.registry import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Mapping

if TYPE_CHECKING:
    Backend = str
else:
    _CHOICES = ("auto", *BACKENDS)
    Backend = Literal[_CHOICES]
Strategy = Literal[
    "no_shard",
    "full_shard",
    "shard_grad_op",
    "hybrid_shard",
    "hybrid_shard_zero2",
    "zero1",
    "zero2",
    "zero3",
]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]


class RunConfig(Section):
    """One run: the whole YAML file, every flag, every default."""

    backend: Backend = Field(
        default="auto",
        description="Machine to run on: cpu, cuda (GPUs), or xla (TPUs). auto: a TPU if there is one, else "
        "GPUs, else the CPU.",
    )
    strategy: Strategy = Field(
        default="full_shard",
        description="What the ranks share. FSDP: full_shard shards parameters, gradients and optimizer "
        "state; shard_grad_op keeps parameters whole between forward and backward; the hybrid ones shard in "
        "a group and replicate across groups; no_shard replicates everything (DDP). DeepSpeed: zero1 "
        "(optimizer state), zero2 (and gradients), zero3 (and parameters).",
    )
    output_dir: PathText = Field(
        default="runs/quickstart",
        description="Folder for the resolved config, metrics, checkpoints and the final model, or the URL of "
        "one in an object store (s3://bucket/run, gs://bucket/run). The same command with the same folder "
        "goes on where the run stopped.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**32,
        description="Source of all randomness: initial weights, data order, dropout.",
        json_schema_extra=IDENTITY,
    )
    precision: Precision = Field(
        default="auto",
        description="Type that layers compute in; master weights and moments are fp32 always. auto: bf16 "
        "where the device computes in it natively, else fp32. tf32: fp32 with faster, shorter products on "
        "NVIDIA GPUs. fp16: with loss scaling (section fp16), for GPUs without bf16.",
        json_schema_extra=IDENTITY,
    )
    compile: Flag = Field(
        default=False,
        description="Compile each layer of the model with torch.compile: a slow first step, faster ones "
        "after it. XLA always compiles, whatever this says.",
    )
    compile_backend: str = Field(
        default="inductor",
        min_length=1,
        description="What torch.compile compiles with: inductor, or another backend that torch knows "
        "(aot_eager and eager compile nothing, for finding out what goes wrong).",
    )
    compile_mode: CompileMode = Field(
        default="default",
        description="How much inductor tries: reduce-overhead captures CUDA graphs, max-autotune looks for "
        "the fastest kernels and captures graphs, too. Capturing needs no_shard, or one rank.",
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description=str(ModelConfig.__doc__))
    data: DataConfig = Field(default_factory=DataConfig, description=str(DataConfig.__doc__))
    train: TrainConfig = Field(default_factory=TrainConfig, description=str(TrainConfig.__doc__))
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description=str(MemoryConfig.__doc__))
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig, description=str(FsdpConfig.__doc__))
    fp16: Fp16Config = Field(default_factory=Fp16Config, description=str(Fp16Config.__doc__))
    deepspeed: DeepSpeedConfig = Field(
        default_factory=DeepSpeedConfig, description=str(DeepSpeedConfig.__doc__)
    )
    xla: XlaConfig = Field(default_factory=XlaConfig, description=str(XlaConfig.__doc__))
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description=str(CheckpointConfig.__doc__)
    )
    log: LogConfig = Field(default_factory=LogConfig, description=str(LogConfig.__doc__))

    _put: dict[str, Any] = PrivateAttr(default_factory=dict)
    _came_from: dict[str, str] = PrivateAttr(default_factory=dict)
    _documents: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _settle_and_check(self) -> RunConfig:
        for key, value in rules.derived(self).items():
            keys.put_default(self, key, value)
        rules.check(self)
        return self

    def is_set(self, key: str) -> bool:
        """Whether the user gave ``key`` (dotted, as ``train.steps``), in a file or by a flag.

        For a section: whether anything in it was given. Raises ``KeyError`` for a key that is none.
        """
        return keys.is_set(self, key)

    @property
    def came_from(self) -> dict[str, str]:
        """Of what was given in files and by flags, by dotted key, where: for people to read."""
        return self._came_from

    @property
    def documents(self) -> Mapping[str, Any]:
        """Files that settings name, read and parsed, by the setting's key: see :meth:`with_document`."""
        return self._documents

    def with_document(self, key: str, document: Any) -> RunConfig:
        """A copy that carries what the file of setting ``key`` holds, so that nobody reads it again."""
        copy = self.replaced({})
        copy._documents = {**self._documents, key: document}
        return copy

    def get(self, key: str) -> Any:
        """The value of the dotted ``key``. Raises ``KeyError`` for a key that is none."""
        return keys.get(self, key)

    def fingerprint(self) -> dict[str, Any]:
        """The settings that define the run, by dotted key, as plain JSON values."""
        return {
            key: keys.plain(self.get(key))
            for key, setting in keys.settings(type(self)).items()
            if setting.identity
        }

    def replaced(self, values: Mapping[str, Any]) -> RunConfig:
        """A copy with ``values`` (by dotted key) put in, its dependent defaults and rules gone through again.

        For what only the machine or another file can tell, as ``{"backend": "cuda"}`` in place of ``auto``.
        What is put in does not count as set by the user. Raises ``UserError`` where a rule is broken.
        """
        put = {**self._put, **values}
        copy = build(type(self), keys.nested({**keys.given(self), **put}))
        copy._put = put
        copy._came_from = self._came_from
        copy._documents = self._documents
        for key in put:
            if not self.is_set(key):
                keys.forget(copy, key)
        return copy

    def __eq__(self, other: object) -> bool:
        # By value alone: a resolved config read back from its file is the same config.
        return isinstance(other, RunConfig) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]
