"""Define the values that the options of `portable-convert` accept.

They are in a separate module because `--help` lists them. The modules that implement the options
are slow to import, and `--help` does not need them.
"""

from __future__ import annotations

# Safetensors dtype for each value of --dtype. None keeps the dtype of each tensor.
DTYPES: dict[str, str | None] = {
    "keep": None,
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "fp32": "F32",
    "bf16": "BF16",
    "fp16": "F16",
    "q8_0": "Q8_0",  # this and the following dtypes require --to gguf
    "q4_0": "Q4_0",
    "mxfp4": "MXFP4",
}
# Values of --quantize. See portable.converters.quantization.quantize.
QUANTIZATION_FORMS = ("fp8-block", "fp8", "mxfp4", "int8", "int4")
# Maximum ratio of output size to source size, unless --expand is given. A cast to a wider dtype multiplies
# the size by up to four.
MAX_EXPANSION = 8
# Module and function that plan the output files, for each value of --to.
WRITERS = {
    "safetensors": "portable.converters.writers.safetensors_writer:plan_safetensors",
    "dcp": "portable.converters.writers.dcp_writer:plan_dcp",
    "dcp-safetensors": "portable.converters.writers.safetensors_writer:plan_dcp_safetensors",
    "torch": "portable.converters.writers.torch_writer:plan_torch",
    "deepspeed-universal": "portable.converters.writers.universal_writer:plan_universal",
    "gguf": "portable.converters.writers.gguf_writer:plan_gguf",
}
# Values of --names. See portable.converters.naming.
NAME_KINDS = ("published", "live")
# Output formats that use published tensor names by default. Programs that read the other formats use
# in-memory names.
FORMATS_WITH_PUBLISHED_NAMES = ("safetensors", "torch", "gguf")
# File with the settings of a peft adapter.
ADAPTER_CONFIG = "adapter_config.json"
# File with the r, lora_alpha, and task_type of a LoRA checkpoint of verl.
VERL_CONFIG = "lora_train_meta.json"


def is_unset(value: object) -> bool:
    """Return whether a setting written by another program is None, False, or empty.

    Later releases of a program may add settings, and write them even if they are off. An unknown
    setting with such a value is therefore not an error.
    """
    return value is None or value is False or (isinstance(value, (str, list, tuple, dict)) and not value)
