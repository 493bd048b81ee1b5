"""Quantized weights as floats: each format compared with its library, or with its formula in torch."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from portable.converters import dequantize_checkpoint, open_checkpoint
from portable.converters.cli import main
from portable.converters.quantization.dequantize import METHODS
from tests.converters.compare import error_of
from tests.quantization_defaults import FILE, build_table
from tests.tiny_models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Case = tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def spread(scale: Tensor, height: int, width: int, shape: tuple[int, int]) -> Tensor:
    """Return the scale of each element, from one scale per block of a matrix."""
    wide = scale.float().repeat_interleave(height, -2).repeat_interleave(width, -1)
    return wide[..., : shape[0], : shape[1]]


def eight(*shape: int, kind: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.randn(*shape).clamp(-3, 3).mul(40).to(kind)


def fp8_blocks(kind: torch.dtype = torch.float8_e4m3fn) -> Case:
    """Return a case of DeepSeek's `weight_dequant`, with blocks that do not divide the shape."""
    weight, scale = eight(70, 100, kind=kind), torch.rand(5, 4) + 0.1
    settings = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": torch.rand(7)}
    tensors["a.activation_scale"] = torch.ones(1)
    whole = {
        "a.weight": weight.float() * spread(scale, 16, 32, (70, 100)),
        "norm.weight": tensors["norm.weight"],
    }
    return settings, tensors, whole


def fp8_blocks_of_compressed_tensors() -> Case:
    _, tensors, whole = fp8_blocks()
    tensors["a.weight_scale"] = tensors.pop("a.weight_scale_inv")
    settings = compressed("float-quantized")
    described = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}
    settings["config_groups"]["group_0"]["weights"] = described
    return settings, tensors, whole


def fp8_exponents() -> Case:
    """Return a stack of experts whose scales are powers of two."""
    weight = eight(3, 32, 64)
    scale = torch.randint(120, 134, (3, 2, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wide = torch.stack([spread(part.float(), 16, 16, (32, 64)) for part in scale])
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}
    return settings, {"up": weight, "up_scale_inv": scale}, {"up": weight.float() * wide}


def fp4_experts(name: str, scale_name: str, *shape: int) -> Case:
    """Return an FP8 weight and FP4 experts, dequantized by transformers as in DeepSeek V4."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    settings, tensors, expected = fp8_blocks()
    scale_shape = (*shape[:-1], 2 * shape[-1] // 32)
    packed = torch.randint(-128, 128, shape, dtype=torch.int8)
    scale = torch.randint(120, 134, scale_shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    floats = Fp8Dequantize(None).convert({"weight": packed, "weight_scale_inv": scale.float()})["weight"]
    settings |= {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}
    return settings, {name: packed, scale_name: scale, **tensors}, {name: floats, **expected}


def fp8_rows() -> Case:
    weight, scale = eight(33, 17), torch.rand(33, 1) + 0.1
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale_ub": torch.ones(1)}
    return {"quant_method": "fbgemm_fp8"}, tensors, {"a.weight": weight.float() * scale}


def fp8_whole() -> Case:
    weight, scale = eight(33, 17), torch.tensor(0.37)
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale": torch.ones(1)}
    settings = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return settings, tensors, {"a.weight": weight.float() * scale}


def mxfp4() -> Case:
    """Return a case of transformers' unpacking of the experts of GPT-OSS."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 40, 5), dtype=torch.uint8)
    whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensors = {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}
    return {"quant_method": "mxfp4"}, tensors, {"e.gate_up_proj": whole}


def pairs(*shape: int) -> tuple[Tensor, Tensor]:
    """Return bytes of two FP4 codes each, and their values."""
    packed = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(*shape[:-1], -1)
    return packed, FP4[codes.long()]


def nvfp4() -> Case:
    packed, values = pairs(24, 32)
    scale, whole = (torch.rand(24, 4) * 100 + 1).to(torch.float8_e4m3fn), torch.tensor(0.013)
    tensors = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": whole}
    expected = values * spread(scale.float() * whole, 1, 16, (24, 64))
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors, {"a.weight": expected}


def nvfp4_of_compressed_tensors() -> Case:
    packed, values = pairs(24, 32)
    scale, whole = (torch.rand(24, 4) * 100 + 1).to(torch.float8_e4m3fn), torch.tensor([771.0])
    tensors = {"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_global_scale": whole}
    expected = values * spread(scale.float() / whole, 1, 16, (24, 64))
    return compressed("nvfp4-pack-quantized"), tensors, {"a.weight": expected}


def compressed(form: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "format": form}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the first dimension, lowest bits first, like AutoGPTQ's `pack`."""
    flat = np.zeros((codes.shape[0] * bits // 32, codes.shape[1]), np.uint64)
    for number, row in enumerate(codes.numpy().astype(np.uint64)):
        word, shift = divmod(number * bits, 32)
        flat[word] |= row << np.uint64(shift) & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            flat[word + 1] |= row >> np.uint64(32 - shift)
    return torch.from_numpy(flat.astype(np.uint32).view(np.int32))


def of_library(form: str, shape: tuple[int, int], weights: dict[str, Any]) -> Case:
    """Return a case with the scales, compression and decompression of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)
    args = scheme.weights
    weight = torch.randn(*shape)
    grouped = weight.unflatten(-1, (-1, args.group_size)) if args.group_size else weight[:, None]
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    state = compressor.compress(state, scheme)
    whole = compressor.decompress(state, scheme)["weight"].float()
    settings = compressed(form)
    settings["config_groups"]["group_0"]["weights"] = args.model_dump(mode="json")
    return settings, {f"a.{name}": value for name, value in state.items()}, {"a.weight": whole}


def ordered_int4() -> Case:
    """Return groups of columns in another order, given by `weight_g_idx` of older versions."""
    settings, tensors, _ = of_library("pack-quantized", (30, 96), {"num_bits": 4, **groups(32)})
    codes = (tensors["a.weight_packed"][..., None] >> torch.arange(0, 32, 4) & 15).flatten(1) - 8
    index = torch.arange(96).div(32, rounding_mode="floor")[torch.randperm(96)]
    whole = codes * tensors["a.weight_scale"][:, index]
    return settings, {**tensors, "a.weight_g_idx": index.to(torch.int32)}, {"a.weight": whole}


def gptq(bits: int, form: str = "gptq", *, ordered: bool = False) -> Case:
    inputs, outputs, groups = 96, 64, 3
    codes = torch.randint(0, 1 << bits, (inputs, outputs))
    zeros = torch.randint(1, 1 << bits, (groups, outputs))
    scales = (torch.rand(groups, outputs) + 0.1).to(torch.float16)
    index = torch.arange(inputs) // (inputs // groups)
    index = index[torch.randperm(inputs)] if ordered else index
    tensors = {
        "a.qweight": words(codes, bits),
        "a.qzeros": words((zeros - int(form == "gptq")).T, bits).T,
        "a.scales": scales,
        "a.g_idx": index.to(torch.int32),
        "a.bias": torch.rand(outputs),
    }
    whole = scales.float()[index] * (codes - zeros[index])
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": form}
    if bits == 4 and form == "gptq":
        settings["checkpoint_format"] = None  # means the default, like a missing key
    return settings, tensors, {"a.weight": whole.T, "a.bias": tensors["a.bias"]}


def awq() -> Case:
    inputs, outputs, groups = 64, 48, 2
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (groups, outputs))
    scales = (torch.rand(groups, outputs) + 0.1).to(torch.float16)

    def packed(values: Tensor) -> Tensor:
        return words(values.reshape(len(values), -1, 8)[..., order].reshape(len(values), -1).T, 4).T

    tensors = {"a.qweight": packed(codes), "a.qzeros": packed(zeros), "a.scales": scales}
    whole = (codes - zeros.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)
    return {"quant_method": "awq", "bits": 4, "version": "gemm"}, tensors, {"a.weight": whole.T}


def bitsandbytes(
    kind: str, *, nested: bool = False, columns: int = 64, storage: torch.dtype = torch.uint8
) -> Case:
    """Return a case of bitsandbytes' quantization, state and dequantization on the CPU, uncompiled."""
    from bitsandbytes import functional

    weight = torch.randn(48, columns)
    with torch.compiler.set_stance("force_eager"):
        packed, state = functional.quantize_4bit(
            weight, blocksize=64, quant_type=kind, compress_statistics=nested, quant_storage=storage
        )
        whole = functional.dequantize_4bit(packed, state)
    tensors = {"a.weight": packed}
    tensors |= {f"a.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    settings = {"bnb_4bit_quant_storage": str(storage).removeprefix("torch.")}
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, **settings}, tensors, {"a.weight": whole}


def llm_int8() -> Case:
    from bitsandbytes import functional

    weight = torch.randint(-127, 128, (40, 24), dtype=torch.int8)
    maxima = torch.rand(40) + 0.1
    whole = functional.int8_vectorwise_dequant(weight, maxima)
    tensors = {"a.weight": weight, "a.SCB": maxima, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, {"a.weight": whole}


def groups(size: int) -> dict[str, Any]:
    return {"strategy": "group", "group_size": size}


CHANNELS, FLOAT8 = {"strategy": "channel"}, {"num_bits": 8, "type": "float"}
EXPONENTS = {**groups(32), "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
CASES: dict[str, Callable[[], Case]] = {
    "fp8 blocks": fp8_blocks,
    "fp8 blocks of e5m2": lambda: fp8_blocks(torch.float8_e5m2),
    "fp8 blocks of compressed-tensors": fp8_blocks_of_compressed_tensors,
    "fp8 exponents": fp8_exponents,
    "fp4 experts": lambda: fp4_experts("e.weight", "e.weight_scale_inv", 32, 64),
    "fp4 experts, stacked": lambda: fp4_experts("e.gate_up_proj", "e.gate_up_proj_scale_inv", 3, 32, 64),
    "fp4 experts of DeepSeek V4": lambda: fp4_experts("e.w1.weight", "e.w1.scale", 32, 64),
    "fp8 rows": fp8_rows,
    "fp8 whole": fp8_whole,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "nvfp4 of compressed-tensors": nvfp4_of_compressed_tensors,
    **{
        f"int{bits}, symmetric {even}": partial(
            of_library, "pack-quantized", (30, 72), {"num_bits": bits, **groups(24), "symmetric": even}
        )
        for bits, even in ((2, True), (3, False), (4, True), (5, True), (8, False))
    },
    "int4, odd columns": partial(of_library, "pack-quantized", (31, 45), {"num_bits": 4, **CHANNELS}),
    "int4 in another order": ordered_int4,
    "int8": partial(of_library, "int-quantized", (31, 45), {"num_bits": 8, **CHANNELS}),
    "int8 with zero points": partial(
        of_library, "int-quantized", (31, 45), {"num_bits": 8, **CHANNELS, "symmetric": False}
    ),
    "fp8 channels": partial(of_library, "float-quantized", (31, 45), {**FLOAT8, **CHANNELS}),
    "fp8 groups": partial(of_library, "float-quantized", (31, 64), {**FLOAT8, **groups(32)}),
    "mxfp8 of compressed-tensors": partial(of_library, "mxfp8-quantized", (31, 64), {**FLOAT8, **EXPONENTS}),
    "mxfp4 of compressed-tensors": partial(
        of_library, "mxfp4-pack-quantized", (31, 64), {**FLOAT8, **EXPONENTS, "num_bits": 4}
    ),
    **{f"gptq {bits}": partial(gptq, bits) for bits in (2, 3, 4, 8)},
    "gptq in another order": lambda: gptq(4, ordered=True),
    "gptq 2": lambda: gptq(4, "gptq_v2"),
    "awq": awq,
    "nf4": lambda: bitsandbytes("nf4"),
    "nf4 nested": lambda: bitsandbytes("nf4", nested=True),
    "nf4 of an odd shape": lambda: bitsandbytes("nf4", columns=63),
    "fp4": lambda: bitsandbytes("fp4"),
    **{
        f"nf4 in {storage}": partial(bitsandbytes, "nf4", nested=True, columns=66, storage=storage)
        for storage in (torch.bfloat16, torch.float16, torch.float32)
    },
    "llm.int8": llm_int8,
}


def written(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_dequantized_weights_match_format(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings, tensors, whole = CASES[name]()
    # Newer releases of the writers add settings without an effect.
    unset: dict[str, Any] = {
        "moe_sparsity_config": None,
        "new_switch": False,
        "new_table": {},
        "new_list": [],
    }
    method = settings.get("quant_method", "bitsandbytes")
    supported = METHODS[method][1]
    defaults = {key: value for key, value in build_defaults()[method].items() if key not in supported}
    source = written(tmp_path / "in", {**unset, **defaults, **settings}, tensors)
    for dtype, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        out = tmp_path / dtype
        assert main([str(source), str(out), "--dequantize", dtype, "--verify", "--quiet"]) == 0
        found = load_file(out / "model.safetensors")
        assert set(found) == set(whole)
        for key, expected in whole.items():
            stored = tensors.get(key)
            unchanged = stored is not None and (stored.dtype, stored.shape) == (
                expected.dtype,
                expected.shape,
            )
            wanted = expected if unchanged else expected.to(kind)
            assert found[key].dtype == wanted.dtype
            assert torch.equal(found[key], wanted), key
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
    tensor = dequantize_checkpoint(open_checkpoint(source), "float32").tensors[next(iter(whole))]
    part = (slice(None),) * (len(tensor.shape) - 2) + (slice(5, 19), slice(3, 11))
    assert np.array_equal(tensor.read(part), whole[tensor.name][part].numpy())


build_defaults = cache(build_table)


def test_quantization_defaults_match_libraries() -> None:
    assert json.loads(FILE.read_bytes()) == build_defaults()


SCALE = "a.weight_scale_inv"
nested_nf4 = partial(bitsandbytes, "nf4", nested=True)
STATE = "a.weight.quant_state.bitsandbytes__nf4"


def build_nested_state(**offset: int) -> dict[str, Tensor | None]:
    """Return the state of a weight with quantized maxima, as JSON in a tensor."""
    state = {"shape": [48, 64], "blocksize": 64, "nested_blocksize": 256, **offset}
    return {STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


# Tensors and settings that differ from the case, and the expected error.
BAD: list[tuple[Callable[[], Case], dict[str, Tensor | None], dict[str, Any], str]] = [
    (fp8_blocks, {SCALE: None}, {}, "a.weight does not belong to any weight"),
    (fp8_blocks, {"a.weight": None}, {}, f"{SCALE} does not belong to any weight"),
    (fp8_blocks, {SCALE: torch.ones(5, 3)}, {}, f"{SCALE}: the F32 tensor of shape [5, 3] does not match"),
    (fp8_blocks, {SCALE: torch.full((5, 4), torch.nan)}, {}, f"{SCALE}: a scale is infinite or NaN"),
    (fp8_blocks, {SCALE: torch.zeros(5, 4)}, {}, f"{SCALE}: a scale is 0, but its block contains"),
    (fp8_blocks, {"b.weight": eight(9)}, {}, "b.weight does not belong to any weight"),
    (fp8_blocks, {}, {"rotate": True}, "rotate is an unknown setting"),
    (fp8_blocks, {}, {"expert_dtype": "int4"}, "expert_dtype 'int4' is not supported (supported: fp8, fp4)"),
    (fp8_blocks, {}, {"quant_method": "hqq"}, "quant_method 'hqq' is not one of"),
    (fp8_blocks, {}, {"weight_block_size": "x"}, "weight_block_size 'x' is not a list of two"),
    # Tables that are too small.
    (nested_nf4, {"a.weight.nested_absmax": torch.zeros(0)}, {}, "a.weight.nested_absmax: "),
    (nested_nf4, build_nested_state(), {}, f"{STATE}: does not contain a valid quantization state"),
    (nested_nf4, build_nested_state(nested_offset=10**400), {}, f"{STATE}: does not contain a valid"),
    (nested_nf4, {"a.weight.quant_map": torch.zeros(3)}, {}, "a.weight.quant_map: "),
    (nested_nf4, {"a.weight.absmax": torch.zeros(48)}, {}, "a.weight.absmax: "),
    (llm_int8, {"a.weight_format": torch.tensor(torch.nan)}, {}, "a.weight_format: the weight has a GPU-"),
    (ordered_int4, {"a.weight_g_idx": torch.full((96,), torch.nan)}, {}, "a.weight_g_idx: the F32 tensor"),
    (partial(gptq, 4), {}, {"bits": 8}, "tensor of shape [12, 64] does not contain 96 x 64 codes of 8 bits"),
]


@pytest.mark.parametrize(("made", "other", "changed", "told"), BAD, ids=[told for *_, told in BAD])
def test_dequantize_rejects_inconsistent_tensors(
    made: Callable[[], Case],
    other: dict[str, Tensor | None],
    changed: dict[str, Any],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, tensors, _ = made()
    held = {name: value for name, value in (tensors | other).items() if value is not None}
    source = written(tmp_path / "in", settings | changed, held)
    assert told in error_of(capsys, source, tmp_path / "out", "--dequantize")
    assert not (tmp_path / "out").exists()


def test_convert_copies_torchao_weights_without_cast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers saves the parts of torchao's tensors under special names."""
    torchao = pytest.importorskip("torchao.quantization")
    transformers = pytest.importorskip("transformers")
    tiny_model("llama").save_pretrained(tmp_path / "base")
    settings = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float16, quantization_config=settings
    )
    source, out = tmp_path / "in", tmp_path / "out"
    model.save_pretrained(source)
    stored = load_file(source / "model.safetensors")
    assert main([str(source), str(out), "--dtype", "bfloat16", "--verify", "--quiet"]) == 0
    converted = load_file(out / "model.safetensors")
    parts = [name for name in stored if "_weight_" in name]
    assert len(parts) > 10
    assert all(torch.equal(converted[name], stored[name]) for name in parts)
    assert converted["model.norm.weight"].dtype == torch.bfloat16
    refusal = error_of(capsys, source, tmp_path / "floats", "--dequantize")
    assert "quant_method 'torchao' is not one of" in refusal


def test_dequantize_reads_settings_file_of_modelopt(tmp_path: Path) -> None:
    _, tensors, whole = fp8_whole()
    source = written(tmp_path / "in", {}, tensors)
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}}
    (source / "hf_quant_config.json").write_text(json.dumps(told))
    assert main([str(source), str(tmp_path / "out"), "--dequantize", "float32"]) == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], whole["a.weight"])
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
