"""Schema of a run's configuration. Flags, JSON Schema and the reference page are derived from it.

The defaults are the settings of the quickstart: a Llama with four million parameters, trained on
the source code of Python's standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, PrivateAttr, model_validator

from portable.config import keys
from portable.config.derived_defaults import compute_derived_defaults
from portable.config.field_types import IDENTITY, CompileBackend, Flag, PathText, Section
from portable.config.number_types import Ranks, Seed  # noqa: TC001 (pydantic evaluates the annotations)
from portable.config.sections import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    Fp16Config,
    FsdpConfig,
    HubConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    TrainConfig,
    XlaConfig,
)
from portable.config.validation import validate_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config.origins import Origin

Backend = Literal["auto", "cpu", "cuda", "xla", "tpu"]
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


class _AttributeLocation(NamedTuple):
    """The Python attribute that contains the value of a setting.

    Attributes:
        owner: The config itself, or the section that contains the setting.
        attribute: Name of the attribute in ``owner``.
    """

    owner: Section
    attribute: str


class RunConfig(Section):
    """The configuration of a run, with all defaults."""

    backend: Backend = "auto"
    """Hardware to run on. auto: TPUs if there are any, otherwise GPUs, otherwise the CPU. cpu: the CPU. cuda:
    GPUs. xla: TPUs with PyTorch/XLA. tpu: TPUs with TorchTPU."""
    strategy: Strategy = "full_shard"
    """Sharding of the parameters, the gradients and the optimizer state across ranks. no_shard: no sharding;
    every rank has a full copy (DDP). full_shard: FSDP shards all of them. shard_grad_op: like full_shard, but
    the parameters stay gathered between the forward and the backward pass. hybrid_shard: full_shard within
    each group of ranks; every group has a full copy (HSDP). hybrid_shard_zero2: shard_grad_op within each
    group of ranks; every group has a full copy. zero1: DeepSpeed shards the optimizer state. zero2: DeepSpeed
    shards the optimizer state and the gradients. zero3: DeepSpeed shards all of them."""
    context_parallel_size: Ranks = 1
    """Number of consecutive ranks that split each sequence among them. Raise it if the activations of a long
    sequence do not fit on one device. You can resume a run with a different size."""
    tensor_parallel_size: Ranks = 1
    """Number of consecutive ranks that split the weight matrices of each layer among them, according to the
    model's tensor-parallel plan in transformers. This requires an FSDP strategy. You can resume a run with a
    different size."""
    expert_parallel_size: Ranks = 1
    """Number of consecutive ranks that split the experts of each mixture-of-experts layer among them. Each
    rank processes different sequences and sends each token to the ranks that hold the experts selected for
    it. This requires an FSDP strategy. You can resume a run with a different size."""
    output_dir: PathText = "runs/quickstart"
    """Folder for the resolved config, metrics, checkpoints and the final model, or a URL in an object store,
    such as ``s3://bucket/run`` or ``gs://bucket/run``. If you run the same command again with the same
    folder, the run resumes."""
    seed: Seed = Field(default=0, json_schema_extra=IDENTITY)
    """Seed of all random numbers, which determine the initial weights, the order of the data, and dropout."""
    precision: Precision = Field(default="auto", json_schema_extra=IDENTITY)
    """Dtype of the computation. For the dtype of the trained weights, see train.master_dtype. auto: ``bf16``
    if the device supports it natively, otherwise ``fp32``. fp32: 32-bit floating point. tf32: like ``fp32``,
    but with faster, less precise matrix products on NVIDIA GPUs. bf16: 16-bit floating point with the range
    of ``fp32``. fp16: 16-bit floating point with dynamic loss scaling (section ``fp16``), for GPUs without
    bf16."""
    fp8: Literal["none", "tensorwise", "rowwise"] = Field(default="none", json_schema_extra=IDENTITY)
    """Compute the matrix products of linear layers in fp8, with torchao. All other computations use bf16,
    including the matrix products of stacked experts. This requires ``precision: bf16`` and a GPU with compute
    capability 8.9 or higher, and is faster than bf16 only with ``compile: true``. On a CPU, fp8 is emulated.
    none: no fp8. tensorwise: one scale per tensor, which is faster. rowwise: one scale per row, which is more
    precise."""
    compile: Flag = False
    """Compile each layer with ``torch.compile``. The first step takes longer, and later steps are faster. XLA
    always compiles."""
    compile_backend: CompileBackend = "inductor"
    """Backend of ``torch.compile``. ``inductor`` generates optimized code. ``aot_eager`` and ``eager``
    generate no code; use them to find out whether the compiler causes an error. Other backends of
    ``torch.compile`` are also supported."""
    compile_mode: CompileMode = "default"
    """Mode of ``inductor``. CUDA graphs require ``strategy: no_shard`` or a single rank. default: no CUDA
    graphs. reduce-overhead: use CUDA graphs. max-autotune: search for the fastest kernels, and use CUDA
    graphs. max-autotune-no-cudagraphs: search for the fastest kernels, and use no CUDA graphs."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    hub: HubConfig = Field(default_factory=HubConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig)
    fp16: Fp16Config = Field(default_factory=Fp16Config)
    deepspeed: DeepSpeedConfig = Field(default_factory=DeepSpeedConfig)
    xla: XlaConfig = Field(default_factory=XlaConfig)

    _put: dict[str, Any] = PrivateAttr(default_factory=dict)
    _origins: dict[tuple[str, ...], Origin] = PrivateAttr(default_factory=dict)
    _documents: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _apply_derived_defaults(self) -> RunConfig:
        """Replace defaults of the schema with defaults that depend on other settings.

        pydantic calls this validator after it has validated all fields. The new values do not count as set
        by the user.
        """
        for key, value in compute_derived_defaults(self).items():
            setting = keys.get_setting_fields(type(self))[key]
            if not setting.section:  # frozen models do not allow plain assignment
                object.__setattr__(self, setting.attribute, value)
                continue
            # Copy the section, because other configs may share it as a default.
            section = getattr(self, setting.section).model_copy(update={setting.attribute: value})
            # The new value does not count as set by the user.
            section.model_fields_set.discard(setting.attribute)
            object.__setattr__(self, setting.section, section)
        return self

    def _find_attribute(self, key: str) -> _AttributeLocation:
        """Find the Python attribute of a setting. Raises ``KeyError`` for an unknown key."""
        setting = keys.get_setting_fields(type(self))[key]
        owner = getattr(self, setting.section) if setting.section else self
        return _AttributeLocation(owner, setting.attribute)

    def is_set(self, key: str) -> bool:
        """Return whether the user has set ``key`` in a file, by a flag or in Python code.

        Args:
            key: Dotted key, such as ``train.steps``. For a section, return whether any of its keys
                is set.

        Raises:
            KeyError: If the key is unknown.
        """
        if key in keys.get_section_descriptions(type(self)):
            return bool(getattr(self, key).model_fields_set)
        section, attribute = self._find_attribute(key)
        return attribute in section.model_fields_set

    def is_set_or_put(self, key: str) -> bool:
        """Return whether the value of ``key`` comes from the user or from :meth:`replaced`.

        If not, the value is a default.
        """
        return self.is_set(key) or key in self._put

    def given(self) -> dict[str, Any]:
        """Return the settings that the user has set, keyed by dotted key.

        The settings can come from files, flags or Python code.
        """
        return {key: self.get(key) for key in keys.get_setting_fields(type(self)) if self.is_set(key)}

    @property
    def saves_during_training(self) -> bool:
        """Whether checkpoints are saved during training, at intervals or after the best evaluations.

        Checkpoints that only a callback requests do not count.
        """
        train, checkpoint = self.train, self.checkpoint
        evaluates = train.eval_every is not None or train.eval_every_epochs is not None
        saves_at_intervals = checkpoint.every_steps is not None or checkpoint.every_epochs is not None
        return saves_at_intervals or (checkpoint.keep_best is not None and evaluates)

    @property
    def ranks_together(self) -> int:
        """Number of ranks that process the same sequences, under context or tensor parallelism."""
        return self.context_parallel_size * self.tensor_parallel_size

    @property
    def came_from(self) -> dict[str, str]:
        """Origins of the settings that the user has set, as text, keyed by dotted key.

        Example: ``{"train.steps": "--train.steps (over run.yaml:7)"}``.

        If keys inside a mapping or list have origins, these keys are listed instead of the setting.
        For example, ``model.config.hidden_size`` is listed instead of ``model.config``. Settings
        from Python code have no origin and are not listed.
        """
        around = {path[:length] for path in self._origins for length in range(1, len(path))}
        return {
            ".".join(path): origin.text
            + (f" (over {', '.join(origin.overridden)})" if origin.overridden else "")
            for path, origin in self._origins.items()
            if path not in around and ".".join(path) not in keys.get_section_descriptions(type(self))
        }

    @property
    def origins(self) -> dict[tuple[str, ...], Origin]:
        """Origins of the settings that the user has set in files or by flags, keyed by path.

        Origins of sections, and of keys inside mappings and lists, are also included. Filled by
        :func:`portable.config.load.build_run_config`. Empty if Python code has set all values.
        """
        return self._origins

    @property
    def documents(self) -> Mapping[str, Any]:
        """Parsed contents of the files that settings refer to, keyed by the dotted key of the setting.

        See :meth:`with_document`.
        """
        return self._documents

    def with_document(self, key: str, document: Any) -> RunConfig:
        """Return a copy of the config with the parsed content of a file that a setting refers to.

        Ranks and other code then use this content instead of reading the file again.

        Args:
            key: Dotted key of the setting, such as ``deepspeed.config``.
            document: Parsed content of the file.
        """
        copy = self.replaced({})
        copy._documents = {**self._documents, key: document}
        return copy

    def get(self, key: str) -> Any:
        """Return the value of a setting.

        Args:
            key: Dotted key, such as ``train.steps``.

        Raises:
            KeyError: If the key is not a setting. Sections and keys inside mappings are not
                accepted.
        """
        return getattr(*self._find_attribute(key))

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that define the run, as plain JSON values keyed by dotted key.

        Checkpoints contain the fingerprint. On resume,
        :func:`portable.config.changed_settings.find_changes` compares it with the fingerprint of
        the new config.
        """
        return {
            key: keys.to_plain_value(self.get(key))
            for key, setting in keys.get_setting_fields(type(self)).items()
            if setting.is_identity
        }

    def replaced(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a copy of the config in which the values of some settings are replaced.

        Use this method for values that depend on the machine or on another file, such as
        ``{"backend": "cuda"}`` for ``auto``. A replaced setting does not count as set by the user,
        except if the user had set it before. Defaults that depend on other settings are recomputed.
        The checks in :mod:`portable.checks` are not run.

        Args:
            values: New values, keyed by dotted key.

        Raises:
            UserError: If a key is unknown, or if a value does not match the schema.
        """
        put = {**self._put, **values}
        copy = validate_settings(type(self), keys.nest_dotted_keys({**self.given(), **put}))
        copy._put = put
        copy._origins = self._origins
        copy._documents = self._documents
        for key in put.keys() - self.given().keys():
            section, attribute = copy._find_attribute(key)
            section.model_fields_set.discard(attribute)
        return copy

    def __eq__(self, other: object) -> bool:
        """Return whether two configs have equal values in all settings.

        The origins of the values (file and line, or flag) are ignored. A config therefore equals
        the config that is read back from its file.
        """
        return isinstance(other, RunConfig) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]
