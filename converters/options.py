"""What `portable-convert` lets one choose, apart from the code behind it, which takes long to import."""

from __future__ import annotations

# --dtype -> the element type under its safetensors name; None keeps each tensor's own.
DTYPES: dict[str, str | None] = {
    "keep": None,
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "fp32": "F32",
    "bf16": "BF16",
    "fp16": "F16",
}
# A conversion writes at most so many times the bytes that SRC's files hold, unless --expand asks for more.
# A cast to a wider type makes up to four.
EXPANSION = 8
# --to -> a module with `plan_<name>` and `write_<name>`.
WRITERS = {"safetensors": "converters.writers.safetensors_writer", "dcp": "converters.writers.dcp_writer"}
