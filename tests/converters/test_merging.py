"""`--merge-into` compared with peft: `merge_and_unload`, and the logits of the trained model."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from portable.converters.adapters import patterns
from portable.converters.adapters.base_changes import INPUTS_FIRST
from portable.converters.cli import main
from tests.converters.compare import error_of
from tests.tiny_models import tiny_config, tiny_model

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # peft has many such warnings

ANY = "all-linear"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def lora(**settings: Any) -> Any:
    # The scaling is not a power of two, so that the order of roundings matters.
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], **settings})


def shake(model: Any) -> None:
    """Change the trained values, because the initial values of an adapter add nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


class Pair:
    """A base model and an adapter, saved by transformers and peft below `folder`."""

    def __init__(self, folder: Path, model: Any, config: Any, dtype: str = "float32") -> None:
        self.base, self.adapter, self.out = folder / "base", folder / "adapter", folder / "out"
        self.kind = type(model)
        self.dtype = DTYPES[dtype]
        model.to(self.dtype).save_pretrained(self.base)
        self.trained = peft.get_peft_model(self.load(self.base), config).eval()
        shake(self.trained)
        self.trained.save_pretrained(self.adapter)

    def load(self, folder: Path, dtype: torch.dtype | None = None) -> Any:
        return self.kind.from_pretrained(folder, dtype=dtype or self.dtype).eval()

    def merge(self, *more: str) -> Any:
        """Return our merged model, loaded, after a check that every tensor in the files was used."""
        arguments = [str(self.adapter), str(self.out), "--merge-into", str(self.base), "--quiet", *more]
        assert main(arguments) == 0
        loaded, report = self.kind.from_pretrained(self.out, dtype=self.dtype, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        return loaded.eval()

    def truth(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return the state of peft's merge."""
        again = peft.PeftModel.from_pretrained(self.load(self.base, dtype), self.adapter)
        state: dict[str, torch.Tensor] = again.merge_and_unload().state_dict()
        return state


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], before: Any) -> None:
    """Check that values are equal up to float32 rounding, and that the adapter has changed something."""
    assert ours.keys() == theirs.keys()
    moved = 0
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()), msg=name
        )
        moved += not torch.equal(value, before[name])
    assert moved


SEQ2SEQ = partial(tiny_model, "t5", "AutoModelForSeq2SeqLM")
BERT = partial(tiny_model, "bert", "AutoModelForSequenceClassification")
MASKED = partial(tiny_model, "bert", "AutoModelForMaskedLM")
UNTIED = partial(tiny_model, "llama", tie_word_embeddings=False)
OPT = partial(tiny_model, "opt")
VIT = partial(tiny_model, "vit", "AutoModelForImageClassification", image_size=16, patch_size=8)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CAUSAL = (
    *("llama", "qwen3", "gpt2", "gemma", "mistral", "phi3", "opt", "falcon", "bloom", "gpt_neox", "mixtral"),
    *("qwen3_moe", "granitemoe", "gpt_oss", "deepseek_v3", "hy_v3", "kimi_linear", "qwen3_5_moe_text"),
)
KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    # The adapter has the names in memory, the base has the names in files. They differ for experts.
    **{kind: (partial(tiny_model, kind), lora(target_modules=ANY)) for kind in CAUSAL},
    "nemotron_h": (
        partial(tiny_model, "nemotron_h"),
        lora(target_modules=["in_proj", "q_proj", "o_proj", "shared_experts.up_proj"]),
    ),
    "dora": (UNTIED, lora(use_dora=True, target_modules=["embed_tokens", "q_proj", "down_proj"])),
    "dora-conv1d": (partial(tiny_model, "gpt2"), lora(use_dora=True, target_modules=["c_attn", "c_proj"])),
    "rslora": (UNTIED, lora(use_rslora=True)),
    "patterns": (
        UNTIED,
        lora(
            target_modules=ANY,
            rank_pattern={"q_proj": 6, "layers.1.mlp.up_proj": 2},
            alpha_pattern={r".*\.layers\.0\..*v_proj": 11},
        ),
    ),
    "bias-all": (OPT, lora(bias="all")),
    "bias-lora": (OPT, lora(bias="lora_only", target_modules=["q_proj", "fc1"])),
    "lora-bias": (OPT, lora(lora_bias=True)),
    "embeddings": (UNTIED, lora(target_modules=["embed_tokens", "lm_head"])),
    "modules-to-save": (UNTIED, lora(modules_to_save=["embed_tokens", "lm_head", "input_layernorm"])),
    "tokens": (UNTIED, lora(trainable_token_indices=[3, 7, 380])),
    "tokens-alone": (
        UNTIED,
        peft.TrainableTokensConfig(token_indices=[3, 9], target_modules=["embed_tokens"]),
    ),
    "ia3": (OPT, peft.IA3Config(target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"])),
    "ia3-conv1d": (
        partial(tiny_model, "gpt2"),
        peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]),
    ),
    "t5": (SEQ2SEQ, lora(target_modules=ANY)),
    "bert": (BERT, lora(target_modules=ANY, bias="all", modules_to_save=["classifier", "pooler"])),
    "vit": (VIT, lora(target_modules=ANY, bias="all")),
    "layers": (UNTIED, lora(layers_to_transform=[1], target_modules=["q_proj"])),
    "experts": (partial(tiny_model, "qwen3_moe"), lora(target_modules=[], target_parameters=EXPERTS)),
    "one-expert-matrix": (partial(tiny_model, "mixtral"), lora(target_parameters=EXPERTS[1:])),
    "experts-inputs-first": (
        partial(tiny_model, "gpt_oss"),
        lora(target_modules=[], target_parameters=EXPERTS),
    ),
    "square-experts": (
        partial(tiny_model, "gpt_oss", intermediate_size=32),
        lora(target_modules=[], target_parameters=EXPERTS),
    ),
    "router": (partial(tiny_model, "qwen3_moe"), lora(modules_to_save=["mlp.gate"])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merge_of_every_kind_of_adapter_matches_peft(kind: str, tmp_path: Path) -> None:
    make, config = KINDS[kind]
    pair = Pair(tmp_path, make(), config)
    assert_same(pair.merge("--verify").state_dict(), pair.truth(), pair.load(pair.base).state_dict())


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_merge_of_text_model_adapter_into_composite_base(kind: str, tmp_path: Path) -> None:
    """The names in the base have a prefix that transformers removes when it loads only the text model."""
    settings = tiny_config(kind)
    settings["vision_config"] |= {"depth": 1}
    settings.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **settings)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "base")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    trained = peft.get_peft_model(text, lora(target_modules=["q_proj", "in_proj_qkv", "o_proj"])).eval()
    shake(trained)
    trained.save_pretrained(tmp_path / "adapter")
    argv = [str(tmp_path / name) for name in ("adapter", "out")]
    assert main([*argv, "--merge-into", str(tmp_path / "base"), "--quiet"]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert before.keys() == after.keys()
    merged = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(tokens).logits, trained(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["patterns", "dora", "dora-conv1d", "experts"])
def test_merge_rounds_once_to_dtype_of_base(kind: str, dtype: str, tmp_path: Path) -> None:
    """Values differ from the float32 merge by at most one unit in the last place, and rarely."""
    make, config = KINDS[kind]
    pair = Pair(tmp_path, make(), config, dtype)
    ours, exact = pair.merge().state_dict(), pair.truth(torch.float32)
    total = differ = 0
    for name, value in exact.items():
        wanted = value.to(pair.dtype)
        assert ours[name].dtype == pair.dtype
        steps = ordered(ours[name]) - ordered(wanted)
        assert int(steps.abs().max()) <= 1, name
        total, differ = total + steps.numel(), differ + int(steps.count_nonzero())
    assert differ <= total // 1000


def ordered(value: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of the 16-bit floats. Neighbors differ by one."""
    bits = value.contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


BOTH = {"ensure_weight_tying": True}


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({"target_modules": ["embed_tokens"]}, False),
        ({"target_modules": ["lm_head"]}, False),
        ({"target_modules": ["lm_head"], **BOTH}, True),
        ({"target_modules": ["embed_tokens", "q_proj"], **BOTH}, True),
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"], **BOTH}, True),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, False),
        ({"target_modules": ["lm_head"], "use_dora": True, **BOTH}, False),
        ({"trainable_token_indices": [3, 7]}, True),
        ({"trainable_token_indices": {"lm_head": [3, 7]}}, False),
        ({"trainable_token_indices": [3, 7], "target_modules": ["lm_head", "q_proj"]}, False),
        ({}, True),
    ],
    ids=str,
)
def test_merge_unties_embeddings_that_differ(settings: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    """peft changes both embeddings or warns. The trained model changes only one, or both differently."""
    pair = Pair(tmp_path, tiny_model("llama", tie_word_embeddings=True), lora(**settings))
    assert_same_logits(pair.merge(), pair.trained)
    loaded = load_file(pair.out / "model.safetensors")
    assert json.loads((pair.out / "config.json").read_text())["tie_word_embeddings"] is tied
    if tied:
        assert "lm_head.weight" not in loaded
    else:
        assert not torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"])


@pytest.mark.parametrize(("kind", "named"), [("llama", None), ("gpt2", ["wte"]), ("t5", None)])
def test_merge_of_tokens_of_tied_embeddings(kind: str, named: list[str] | None, tmp_path: Path) -> None:
    """The settings name one module; the file has the tokens of each that shares its weight."""
    model = SEQ2SEQ() if kind == "t5" else tiny_model(kind, tie_word_embeddings=True)
    config = peft.TrainableTokensConfig(token_indices=[3, 9], target_modules=named)
    pair = Pair(tmp_path, model, config)
    assert_same_logits(pair.merge(), pair.trained)
    assert "lm_head.weight" not in load_file(pair.out / "model.safetensors")


def assert_same_logits(ours: Any, theirs: Any) -> None:
    given = {"input_ids": torch.arange(12)[None]}
    if ours.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(ours(**given).logits, theirs(**given).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "query", "saved"), [(SEQ2SEQ, "q", "shared"), (MASKED, "query", "word_embeddings")]
)
def test_merge_rejects_embeddings_that_cannot_be_untied(
    model: Any, query: str, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Pair(tmp_path, model(), lora(target_modules=[query], modules_to_save=[saved]))
    assert "cannot untie them" in refused(pair, capsys)


def test_merge_of_new_head_and_resized_embedding(tmp_path: Path) -> None:
    model = tiny_model("llama", "AutoModelForSequenceClassification", num_labels=5, pad_token_id=0)
    model.base_model.save_pretrained(tmp_path / "bare")
    pair = Pair(tmp_path / "labels", model, lora(task_type="SEQ_CLS"))
    shutil.rmtree(pair.base)
    shutil.copytree(tmp_path / "bare", pair.base)
    assert_same_logits(pair.merge(), pair.trained)

    bigger = UNTIED()
    bigger.resize_token_embeddings(391)
    pair = Pair(tmp_path / "tokens", bigger, lora(modules_to_save=["embed_tokens", "lm_head"]))
    shutil.rmtree(pair.base)
    UNTIED().save_pretrained(pair.base)
    merged = pair.merge()
    assert merged.config.vocab_size == 391
    wanted = pair.trained.merge_and_unload().state_dict()
    assert all(
        torch.equal(merged.state_dict()[n], wanted[n])
        for n in ("model.embed_tokens.weight", "lm_head.weight")
    )


@pytest.mark.parametrize(
    ("tied", "settings", "missing"),
    [
        *((tied, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, "") for tied in (False, True)),
        *((tied, {"modules_to_save": ["embed_tokens"]}, "lm_head.weight") for tied in (False, True)),
        (False, {"modules_to_save": ["lm_head"]}, "model.embed_tokens.weight"),
    ],
    ids=str,
)
def test_merge_of_adapter_of_resized_model(
    tied: bool, settings: dict[str, Any], missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft saves the resized tables below LoRA's layers; an adapter without one of them is refused."""
    pair = Pair(tmp_path, tiny_model("llama", tie_word_embeddings=tied), lora(**settings))
    model = pair.load(pair.base)
    model.resize_token_embeddings(391)
    trained = peft.get_peft_model(model, lora(**settings)).eval()
    shake(trained)
    trained.save_pretrained(pair.adapter, save_embedding_layers=not missing)
    if missing:
        assert f"but does not contain '{missing}', which has 384 rows" in refused(pair, capsys)
    else:
        assert_same_logits(pair.merge(), trained)


@pytest.mark.parametrize("version", ["0.18.1", "0.21.2", None])
def test_merge_reads_expert_factors_by_peft_version(
    version: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft before 0.19 stores the factors of a stack transposed, which square shapes do not show."""
    model = tiny_model("qwen3_moe")
    model = tiny_model("qwen3_moe", moe_intermediate_size=model.config.hidden_size // 2)
    pair = Pair(tmp_path, model, lora(target_modules=[], target_parameters=EXPERTS[:1]))
    file, config = pair.adapter / "adapter_model.safetensors", pair.adapter / "adapter_config.json"
    if version == "0.18.1":
        tensors = load_file(file)
        for name in [name for name in tensors if "lora_A" in name]:
            other = name.replace("lora_A", "lora_B")
            first, second = tensors[name].unflatten(0, (-1, 3)), tensors[other].unflatten(1, (3, -1))
            tensors[name] = second.permute(2, 1, 0).flatten(0, 1).contiguous()
            tensors[other] = first.permute(2, 1, 0).flatten(1).contiguous()
        save_file(tensors, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_version": version}))
    if version is None:
        assert "peft_version is missing" in refused(pair, capsys)
    else:
        assert_same_logits(pair.merge(), pair.trained)


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "gpt_neox"])
def test_merge_of_published_names_into_base_with_names_in_memory(kind: str, tmp_path: Path) -> None:
    """transformers 4 has the published names in memory, and an adapter for each expert."""
    tiny_model(kind).save_pretrained(tmp_path / "base")
    assert main([str(tmp_path / "base"), str(tmp_path / "live"), "--names", "live", "--quiet"]) == 0
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert base.keys() != load_file(tmp_path / "live" / "model.safetensors").keys()
    generator = torch.Generator().manual_seed(1)
    words = ("experts.", "dense_4h_to_h", "embed_out", "q_proj")
    factors: dict[str, torch.Tensor] = {}
    wanted = dict(base)
    for name, weight in base.items():
        if weight.ndim == 2 and any(word in name for word in words):
            left = 0.1 * torch.randn(3, weight.shape[1], generator=generator)
            right = 0.1 * torch.randn(weight.shape[0], 3, generator=generator)
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors |= {f"{module}.lora_A.weight": left, f"{module}.lora_B.weight": right}
            wanted[name] = weight + 5 / 3 * right @ left
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": "all-linear"}
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    for name in ("base", "live"):
        argv = [str(tmp_path / "adapter"), str(tmp_path / f"{name}-out")]
        assert main([*argv, "--merge-into", str(tmp_path / name), "--quiet"]) == 0
    assert main([str(tmp_path / "live-out"), str(tmp_path / "published"), "--quiet"]) == 0
    for folder in ("base-out", "published"):
        assert_same(load_file(tmp_path / folder / "model.safetensors"), wanted, base)


def refused(pair: Pair, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Return the one-line error of a merge that writes nothing."""
    err = error_of(capsys, pair.adapter, pair.out, "--merge-into", pair.base, *more)
    assert not pair.out.exists()
    return err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("saved"), UNTIED(), lora(modules_to_save=["lm_head"]))


@pytest.fixture
def pair(saved: Pair, tmp_path: Path) -> Pair:
    """Return a copy of a pair, to be damaged."""
    copied = object.__new__(Pair)
    copied.__dict__ |= saved.__dict__
    copied.base, copied.adapter, copied.out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    shutil.copytree(saved.base, copied.base)
    shutil.copytree(saved.adapter, copied.adapter)
    return copied


def test_merge_rejects_same_adapter_twice(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.merge()
    record = json.loads((pair.out / "merged_adapters.json").read_text())
    assert [known["type"] for known in record["merged"]] == ["LORA"]
    # Not even after a conversion of the merged model.
    assert main([str(pair.out), str(tmp_path / "half"), "--dtype", "bfloat16", "--quiet"]) == 0
    pair.base, pair.out = tmp_path / "half", tmp_path / "again"
    assert "already contains the adapter" in refused(pair, capsys)
    change(pair, lambda tensors: {name: value * 2 for name, value in tensors.items()})
    pair.merge()
    record = json.loads((pair.out / "merged_adapters.json").read_text())
    assert len({known["adapter"] for known in record["merged"]}) == 2


Tensors = dict[str, torch.Tensor]
QUERY = "base_model.model.model.layers.1.self_attn.q_proj"


def change(pair: Pair, how: Callable[[Tensors], Tensors] | dict[str, Any] | bytes) -> None:
    """Change the adapter's tensors, some of its settings, or their complete text."""
    path, settings = pair.adapter / "adapter_model.safetensors", pair.adapter / "adapter_config.json"
    if isinstance(how, bytes):
        settings.write_bytes(how)
    elif isinstance(how, dict):
        settings.write_text(json.dumps(json.loads(settings.read_text()) | how))
    else:
        save_file({name: value.contiguous() for name, value in how(load_file(path)).items()}, path)


def twice(tensors: Tensors) -> Tensors:
    """Double the rank of the factors."""
    return {
        name: value.repeat((2, 1) if "lora_A" in name else (1, 2)) if "lora" in name else value
        for name, value in tensors.items()
    }


DAMAGE: list[tuple[Callable[[Tensors], Tensors] | dict[str, Any] | bytes, str]] = [
    (
        lambda t: {k: v for k, v in t.items() if k != f"{QUERY}.lora_B.weight"},
        "layers.1.self_attn.q_proj: has lora_A, but no lora_B",
    ),
    (twice, "has rank 6, "),
    (
        lambda t: (
            t
            | {
                f"{QUERY}.lora_A.weight": t[f"{QUERY}.lora_A.weight"][:0],
                f"{QUERY}.lora_B.weight": t[f"{QUERY}.lora_B.weight"][:, :0],
            }
        ),
        "has rank 0, ",
    ),
    (
        lambda t: {k.replace("self_attn", "attention"): v for k, v in t.items()},
        "the most similar name is 'model.layers.0.self_attn.q_proj.weight'",
    ),
    (lambda t: t | {"base_model.model.lm_head.weight": torch.ones(384, 31)}, "has shape [384, 32]"),
    (lambda t: t | {f"{QUERY}.lora_A.weight": torch.full((3, 32), torch.nan)}, "contains NaN"),
    (
        lambda t: t | {"base_model.model.extra.weight": torch.ones(3)},
        "the tensor 'extra.weight', which",
    ),
    (lambda t: t | {f"{QUERY}.lora_magnitude_vector": torch.ones(32)}, "use_dora is false"),
    ({"peft_type": "VERA"}, "peft_type 'VERA' is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the base"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set, but an adapter with this setting"),
    ({"use_something_new": True}, "use_something_new is set"),
    ({"r": 0}, "r is 0, but must be a positive integer"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan, but must be a number"),
    (
        {"rank_pattern": {"(.|[a-z])*_": 3}},
        "rank_pattern: the pattern '(.*\\\\.)?((.|[a-z])*_)$' takes too long to match",
    ),
    ({"rank_pattern": {"(": 3}}, "which is not a regular expression, or is too long"),
    ({"bias": "some"}, "unknown bias 'some'; set bias to one of none, all, lora_only"),
    ({"use_dora": True}, "has no lora_magnitude_vector"),
    # peft would omit tensors that the settings do not name.
    (
        {"target_modules": ["self_attn.q_proj", "k_proj"]},
        "v_proj: has an adapter, but does not match target_modules",
    ),
    (b"[" * 100_000, "is not valid JSON"),
]


@pytest.mark.parametrize(("how", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_merge_rejects_damaged_adapters_in_one_line(
    how: Any, message: str, pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_TIMEOUT_SECONDS", 0.2)
    change(pair, how)
    assert message in refused(pair, capsys)


@pytest.mark.parametrize("target", ["experts.gate_up_proj", "mlp.down_proj"])
def test_merge_checks_rank_next_to_target_parameters(
    target: str, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    change(pair, {"target_parameters": [target]})
    change(pair, twice)
    assert "has rank 6, " in refused(pair, capsys)


def test_merge_rejects_indistinguishable_target_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft wraps w1 before v1 in DBRX, because the module defines w1 first."""
    layer = "layers.0.experts"
    weights = {f"{layer}.{name}": torch.zeros(8, 4) for name in ("w1", "v1")}
    paths = [f"base_model.model.{layer}{suffix}" for suffix in ("", ".base_layer")]
    factors = {f"{path}.lora_A.weight": torch.ones(2, 4) for path in paths}
    factors |= {f"{path}.lora_B.weight": torch.ones(8, 2) for path in paths}
    settings = {"peft_type": "LORA", "r": 2, "target_parameters": ["experts.w1", "experts.v1"]}
    for folder, tensors, config in (("base", weights, {"model_type": "odd"}), ("adapter", factors, settings)):
        is_adapter = folder == "adapter"
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / f"{'adapter_' if is_adapter else ''}model.safetensors")
        name = "adapter_config.json" if is_adapter else "config.json"
        (tmp_path / folder / name).write_text(json.dumps(config))
    error = error_of(capsys, tmp_path / "adapter", tmp_path / "out", "--merge-into", tmp_path / "base")
    assert "layers.0.experts: the adapters of v1, w1 cannot be distinguished" in error


def test_merge_reads_adapter_in_pickle(pair: Pair) -> None:
    state = load_file(pair.adapter / "adapter_model.safetensors")
    (pair.adapter / "adapter_model.safetensors").unlink()
    torch.save(state, pair.adapter / "adapter_model.bin")
    assert_same(pair.merge().state_dict(), pair.truth(), pair.load(pair.base).state_dict())


def test_merge_rejects_other_folders_as_base_or_adapter(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = pair.base
    pair.base = pair.adapter
    assert "contains an adapter, but no base model" in refused(pair, capsys)
    pair.base = tmp_path / "other"
    shutil.copytree(pair.adapter, pair.base)
    assert "specify a base model without an adapter" in refused(pair, capsys)
    pair.base, adapter = base, pair.adapter
    pair.adapter = tmp_path / "model"
    shutil.copytree(base, pair.adapter)
    assert "contains no adapter" in refused(pair, capsys)
    pair.adapter = adapter
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    assert "is quantized (gptq)" in refused(pair, capsys)


def test_merge_distinguishes_adapters_by_trained_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both adapters have the same rows, for different tokens."""
    make, config = KINDS["tokens-alone"]
    pair = Pair(tmp_path, make(), config)
    pair.merge()
    digests = [json.loads((pair.out / "merged_adapters.json").read_text())["merged"][0]["adapter"]]
    pair.base, pair.out = pair.out, tmp_path / "again"
    assert "already contains the adapter" in refused(pair, capsys)
    settings = json.loads((pair.adapter / "adapter_config.json").read_text())
    settings["token_indices"] = [4, 10]
    (pair.adapter / "adapter_config.json").write_text(json.dumps(settings))
    pair.merge()
    records = json.loads((pair.out / "merged_adapters.json").read_text())["merged"]
    assert [record["adapter"] for record in records] == digests * 2
    assert [record["settings"]["token_indices"] for record in records] == [
        {"embed_tokens": [3, 9]},
        {"embed_tokens": [4, 10]},
    ]


def test_merge_rejects_adapter_name_for_file_of_peft(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(pair, capsys, "--adapter-name", "first")
    assert "the adapter 'first' cannot be chosen; leave out --adapter-name" in error


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"q_proj{e}", r"(q_proj){i<=1}", r"q{}", r"q{1}_proj", r"q_{,1}proj", r"q_{1,}proj{e}"),
        *(r"[[:alpha:]]+", r"[]{e}]", r"[^[]{6}", r"\{e}", r"q\N{LOW LINE}proj", r"[\]{e}]"),
    ],
)
def test_pattern_matcher_agrees_with_re(pattern: str) -> None:
    matcher = patterns.PatternMatcher()
    texts = ("q_proj", "q_prox", "q_proj{e}", "q{}", "q_", "a]", ":]", "a", "{", "{e}", "q_proj{i<=1}")
    with warnings.catch_warnings(action="ignore"):  # a nested set is deprecated
        for text in texts:
            assert bool(matcher.fullmatch(pattern, text)) == bool(re.fullmatch(pattern, text)), text


def test_merge_reads_separate_settings_and_named_adapter(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (pair.adapter / "adapter_config.json").rename(tmp_path / "settings.json")
    assert "run portable-convert with --adapter-config FILE" in refused(pair, capsys)
    pair.merge("--adapter-config", str(config))
    shutil.rmtree(pair.out)
    model = peft.get_peft_model(UNTIED(), lora())
    model.add_adapter("ref", lora())
    shake(model)
    model.set_adapter("ref")
    shake(model)
    shutil.rmtree(pair.adapter)
    pair.adapter.mkdir()
    torch.save(model.state_dict(), pair.adapter / "model.pt")
    shutil.copy(config, pair.adapter / "adapter_config.json")
    assert "contains several adapters (default, ref)" in refused(pair, capsys)
    assert "contains no adapter 'first'" in refused(pair, capsys, "--adapter-name", "first")
    ours = pair.merge("--adapter-name", "ref").state_dict()
    assert_same(ours, model.merge_and_unload(adapter_names=["ref"]).state_dict(), UNTIED().state_dict())


def test_merge_of_ia3_without_feedforward_modules(tmp_path: Path) -> None:
    """If `feedforward_modules` is null, the shape identifies (IA)^3 vectors of inputs."""
    pair = Pair(tmp_path, OPT(), KINDS["ia3"][1])
    truth = pair.truth()
    change(pair, {"feedforward_modules": None, "target_modules": None})
    assert_same(pair.merge().state_dict(), truth, pair.load(pair.base).state_dict())


def test_merge_supports_all_but_listed_peft_settings() -> None:
    """A setting of a later peft version is rejected by name until this project supports it."""
    from dataclasses import fields

    from portable.converters.adapters.config import SUPPORTED_SETTINGS

    kinds = (peft.LoraConfig, peft.IA3Config, peft.TrainableTokensConfig)
    refused = {field.name for kind in kinds for field in fields(kind)} - SUPPORTED_SETTINGS
    assert refused == {
        *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config"),
        *("monteclora_config", "use_bdlora", "use_qalora", "velora_config"),
    }


def test_inputs_first_types_match_transformers() -> None:
    models = Path(transformers.__file__).parent / "models"
    found = set()
    for path in models.glob("*/modeling_*.py"):
        text = path.read_text()
        if " = Conv1D(" in text or "is_transposed=True" in text:
            found.add(path.parent.name)
    kinds = {"openai" if kind == "openai-gpt" else kind for kind in INPUTS_FIRST}
    assert found == kinds - {"clvp_decoder", "aria_text"}
