"""The choices of `portable-convert`, apart from the code behind them, which is slow to import."""

from __future__ import annotations

# --dtype -> the element type by its safetensors name; None keeps each tensor's own.
DTYPES: dict[str, str | None] = {
    "keep": None,
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "fp32": "F32",
    "bf16": "BF16",
    "fp16": "F16",
    "q8_0": "Q8_0",  # these three: --to gguf only
    "q4_0": "Q4_0",
    "mxfp4": "MXFP4",
}
# --quantize: see portable.converters.quantization.quantize.
QUANTIZATION_FORMS = ("fp8-block", "fp8", "mxfp4", "int8", "int4")
# A conversion writes at most this many times the bytes of SRC's files, unless --expand is given. A cast to a
# wider dtype writes up to four times as many.
MAX_EXPANSION = 8
# --to -> a module, and the function in it that plans the files.
WRITERS = {
    "safetensors": "portable.converters.writers.safetensors_writer:plan_safetensors",
    "dcp": "portable.converters.writers.dcp_writer:plan_dcp",
    "dcp-safetensors": "portable.converters.writers.safetensors_writer:plan_dcp_safetensors",
    "torch": "portable.converters.writers.torch_writer:plan_torch",
    "deepspeed-universal": "portable.converters.writers.universal_writer:plan_universal",
    "gguf": "portable.converters.writers.gguf_writer:plan_gguf",
}
# --names: see portable.converters.naming.
NAME_KINDS = ("published", "live")
# The formats that are written with published names by default. The others are read by programs that know the
# names of the model in memory.
FORMATS_WITH_PUBLISHED_NAMES = ("safetensors", "torch", "gguf")
# The settings of a peft adapter.
ADAPTER_CONFIG = "adapter_config.json"
# The r, lora_alpha, and task_type of a LoRA checkpoint of verl.
VERL_CONFIG = "lora_train_meta.json"


def is_unset(value: object) -> bool:
    """Return whether a setting of another program is null, false, or empty.

    Programs write settings that a later release added, although they have no effect, so an unknown setting
    with such a value is not an error.
    """
    return value is None or value is False or (isinstance(value, (str, list, tuple, dict)) and not value)
