"""Floats as quantized weights: equal to the result of each format's library, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from portable.converters import CheckpointError, dequantize_checkpoint, open_checkpoint, quantize_checkpoint
from portable.converters.cli import main
from portable.converters.options import QUANTIZATION_FORMS
from tests.converters.compare import error_of

NAME = "model.layers.0.mlp.up_proj.weight"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return one linear layer with rows of zeros and of tiny values, and tensors that are not quantized."""
    torch.manual_seed(0)
    weight = torch.randn(256, 384) * torch.logspace(-6, 2, 256)[:, None]
    weight[5] = 0
    weight[128:] *= (torch.arange(384) < 128) | (torch.arange(384) >= 256)  # a block of zeros
    others = {"model.embed_tokens.weight": torch.randn(96, 128), "lm_head.weight": torch.randn(96, 128)}
    others |= {"model.layers.0.mlp.gate.weight": torch.randn(8, 128), "model.norm.weight": torch.ones(128)}
    return {name: value.to(dtype) for name, value in {NAME: weight, **others}.items()}


def of_transformers(weight: Tensor, **settings: Any) -> dict[str, Tensor]:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(**settings)

    made: dict[str, Tensor] = Fp8Quantize(Quantizer()).convert({NAME: weight})
    return made


def of_compressed_tensors(weight: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    args = scheme.weights
    grouped = weight.unflatten(-1, (-1, args.group_size)) if args.group_size else weight[:, None]
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale}
    made = BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)
    return {NAME.removesuffix("weight") + name: value for name, value in made.items()}


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return folder


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes, which distinguish -0.0 from 0.0."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def codes_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    return load_file(folder / "model.safetensors"), settings


# compressed-tensors' scales of MXFP4 leave the range of float16.
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (form, dtype)
        for form in QUANTIZATION_FORMS
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
        if (form, dtype) != ("mxfp4", torch.float16)
    ],
)
def test_quantized_weights_equal_library(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = weights(dtype)
    source = written(tmp_path / "in", tensors)
    assert main([str(source), str(tmp_path / "out"), "--quantize", form, "--verify", "--quiet"]) == 0
    found, settings = codes_of(tmp_path / "out")
    made = of_transformers(tensors[NAME]) if form == "fp8-block" else None
    expected = {**tensors, **(made or of_compressed_tensors(tensors[NAME], settings))}
    expected.pop(NAME) if f"{NAME}_packed" in expected else None
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(raw(found[name]), raw(value)), name
    kept = settings.get("modules_to_not_convert", settings.get("ignore"))
    assert kept == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
    # Quantize again, like a model that is already quantized.
    like = [str(source), str(tmp_path / "like"), "--quantize-like", str(tmp_path / "out"), "--quiet"]
    assert main(like) == 0
    assert codes_of(tmp_path / "like")[1] == settings
    assert (tmp_path / "like" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((form, "llama") for form in QUANTIZATION_FORMS),
        # transformers cannot load separate int8 experts, not even from llm-compressor.
        *((form, "qwen3_moe") for form in QUANTIZATION_FORMS if form != "int8"),
    ],
)
def test_quantized_model_loads_in_transformers(form: str, kind: str, tmp_path: Path) -> None:
    """The logits equal the logits after --dequantize."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = AutoConfig.for_model(kind, **SIZES, **(experts if kind == "qwen3_moe" else {}))
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    assert main([str(tmp_path / "in"), str(tmp_path / "codes"), "--quantize", form, "--quiet"]) == 0
    back = [str(tmp_path / "codes"), str(tmp_path / "floats"), "--dequantize", "--verify", "--quiet"]
    assert main(back) == 0
    settings = {} if form != "fp8-block" else {"quantization_config": dequantizing(tmp_path / "codes")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype=torch.bfloat16, **settings)
    floats = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.bfloat16)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        ours, theirs = floats(tokens).logits, loaded(tokens).logits
        whole = model(tokens).logits
    assert not torch.equal(ours, whole) and torch.allclose(ours, whole, atol=0.3)
    # Some schemes quantize the activations as well.
    close = 0.0 if form in ("fp8-block", "mxfp4", "int4") else 0.1
    assert float((ours - theirs).abs().max()) <= close


def dequantizing(folder: Path) -> Any:
    from transformers import FineGrainedFP8Config

    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    return FineGrainedFP8Config(**{**settings, "dequantize": True})


def exponents(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Quantize like DeepSeek V3.1, with blocks whose scales are powers of two."""
    settings = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    tensors |= of_transformers(tensors[NAME], **settings)
    return {"quant_method": "fp8", **settings}


def deepseek_v4(tensors: dict[str, Tensor]) -> dict[str, Any]:
    settings = exponents(tensors)
    tensors[NAME.replace("weight", "scale")] = tensors.pop(f"{NAME}_scale_inv")
    return settings


def whole(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Quantize with one scale, and one scale of the activations, as ModelOpt does."""
    weight = tensors[NAME].float()
    scale = weight.abs().max() / 448
    tensors[NAME] = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors |= {f"{NAME}_scale": scale, NAME.replace("weight", "input_scale"): torch.tensor(0.1)}
    return {"quant_method": "modelopt", "quant_algo": "FP8"}


def experts(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Quantize like GPT-OSS, by the rules of OCP."""
    weight = tensors.pop(NAME).float()
    blocks = weight.T.unflatten(1, (-1, 32))
    exponent = (blocks.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
    values = blocks / exponent.exp2()[..., None]
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    middles = (table[1:] + table[:-1]) / 2
    upwards = torch.tensor([False, True, False, True, False, True, False])  # a tie goes to the even code
    codes = ((values.abs()[..., None] > middles) | (values.abs()[..., None] == middles) & upwards).sum(-1)
    codes = codes | torch.signbit(values).long() << 3
    tensors[f"{NAME}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    tensors[f"{NAME}_scales"] = (exponent + 127).to(torch.uint8)
    return {"quant_method": "mxfp4"}


@pytest.mark.parametrize("form", [exponents, deepseek_v4, whole, experts])
def test_quantize_like_base_matches_base(
    form: Callable[[dict[str, Tensor]], dict[str, Any]], tmp_path: Path
) -> None:
    buffers = {"position_ids": torch.arange(9), "causal_mask": torch.ones(3, 3, dtype=torch.bool)}
    buffers |= {"bucket_ids": torch.arange(9, dtype=torch.int32)}
    source = written(tmp_path / "in", weights(torch.float32) | buffers)
    tensors = weights(torch.float32) | buffers
    settings = form(tensors)
    base = written(tmp_path / "base", {name: value.contiguous() for name, value in tensors.items()})
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": settings}
    (base / "config.json").write_text(json.dumps(config))
    assert main([str(source), str(tmp_path / "out"), "--quantize-like", str(base), "--quiet"]) == 0
    found, described = codes_of(tmp_path / "out")
    assert described == settings and set(found) == set(tensors)
    for name, value in tensors.items():
        assert torch.equal(raw(found[name]), raw(value)), name


def test_quantize_like_rejects_fp4_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "in", weights(torch.float32))
    codes = {NAME: torch.ones(256, 192, dtype=torch.int8), f"{NAME}_scale_inv": torch.ones(256, 12)}
    base = written(tmp_path / "base", weights(torch.float32) | codes)
    settings = {"quant_method": "fp8", "expert_dtype": "fp4"}
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    refusal = error_of(capsys, source, tmp_path / "out", "--quantize-like", str(base))
    assert f"{NAME} contains FP4 codes, which --quantize-like cannot write" in refusal


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        (NAME, {"_packed": torch.ones(256, 4, dtype=torch.int32), "_scale": torch.ones(256, 1)}),
        (NAME, {"_packed": torch.ones(256, 256, dtype=torch.int32), "_scale": torch.ones(256, 1)}),
        (NAME, {"_packed": torch.ones(256, 192, dtype=torch.uint8), "_scale": torch.ones(256, 768)}),
        (NAME, {"_packed": torch.ones((), dtype=torch.int32)}),
        ("model.norm.weight", {"": torch.ones(128).to(torch.float8_e4m3fn), "_scale": torch.ones(128)}),
    ],
)
def test_quantize_like_rejects_codes_of_other_shapes(
    name: str, codes: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "in", weights(torch.float32))
    base = written(
        tmp_path / "base", weights(torch.float32) | {name + end: value for end, value in codes.items()}
    )
    settings = {"quant_method": "compressed-tensors"}
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    refusal = error_of(capsys, source, tmp_path / "out", "--quantize-like", str(base))
    assert f"the quantized values of {name} have shape" in refusal


REFUSED: dict[str, tuple[list[str], str]] = {
    "an optimizer": (["--quantize", "fp8", "--optimizer"], "--optimizer"),
    "another format": (["--quantize", "fp8", "--to", "dcp"], "--to dcp"),
    "a base of floats": (["--quantize-like", "IN"], "config.json has no quantization_config"),
    "both": (["--quantize", "fp8", "--quantize-like", "IN"], "leave out one of them"),
    "NaN": (["--quantize", "int8"], "contains NaN or infinite values"),
    "quantized": (["--quantize", "int8"], "--dequantize"),
    "small layers": (
        ["--quantize", "fp8-block"],
        "blocks of 128 x 128 elements, but no linear layer has a shape that is divisible",
    ),
    "short rows": (["--quantize", "int4"], "blocks of 128 columns, but no linear layer has a shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_quantize_rejects_unsupported_models(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, told = REFUSED[case]
    tensors = weights(torch.bfloat16)
    if case == "NaN":
        tensors[NAME][3, 4] = torch.nan
    if case in ("small layers", "short rows"):
        tensors = {name: torch.ones(64, 64) for name in tensors}
    source = written(tmp_path / "in", tensors)
    if case == "quantized":
        quantized = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
        (source / "config.json").write_text(json.dumps(quantized))
    options = [str(source) if option == "IN" else option for option in options]
    assert told in error_of(capsys, source, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_functions_name_supported_formats_and_dtypes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path / "in", weights(torch.float32)))
    with pytest.raises(CheckpointError, match="format 'int3' is unknown; specify one of fp8-block, "):
        quantize_checkpoint(checkpoint, "int3")
    for dtype in ("keep", "int8", "q8_0"):
        with pytest.raises(CheckpointError, match=f"dtype '{dtype}' is not supported; specify bfloat16, "):
            dequantize_checkpoint(checkpoint, dtype)
