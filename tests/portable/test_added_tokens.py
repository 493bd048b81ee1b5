"""Added tokens: the tokenizer has them, and the model's new rows match transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from portable.config import RunConfig
from portable.errors import UserError
from portable.run.rank import run_rank
from tests.engines import Engines
from tests.parity import opened
from tests.portable.chat_support import template
from tests.runs import TINY_MODEL, configured

ADDED = ["<|im_start|>", "<|im_end|>", "<think>"]


def trained(folder: Path, corpus: Path, **settings: Any) -> Path:
    """Train a short run. Returns the folder of its model."""
    run_rank("cpu", configured(folder, corpus, **{"train__steps": 2, **settings}))
    return folder / "final"


def of(base: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of a run that begins with a model."""
    return {"model__config": None, "model__name_or_path": str(base), **settings}


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model whose vocabulary is as large as its tokenizer's, and whose head is not tied."""
    untied = {**TINY_MODEL, "tie_word_embeddings": False}
    final = trained(tmp_path_factory.mktemp("base"), corpus, model__config=untied)
    assert len(AutoTokenizer.from_pretrained(final)) == 384
    return final


def tables(config: RunConfig) -> tuple[dict[str, Any], float]:
    """Return the full embedding tables at the start, and the loss of the first step."""
    with opened(config) as trial:
        folder = Path(config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        trial.engine.save_shards(folder, background=False).wait()
        loss = float(trial.step().loss)
    from portable.converters import open_checkpoint

    stored = open_checkpoint(folder).tensors
    return {name: stored[name].read() for name in ("model.embed_tokens.weight", "lm_head.weight")}, loss


@pytest.mark.parametrize(
    ("name", "size", "settings"),
    [
        ("full_shard", 3, {"strategy": "full_shard"}),
        ("zero3", 2, {"strategy": "zero3"}),
        ("xla", 2, {"backend": "xla"}),
    ],
)
def test_added_token_rows_match_transformers(
    name: str, size: int, settings: Any, base: Path, corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    config = configured(tmp_path / "run", corpus, **of(base, data__added_tokens=ADDED, **settings))
    found, loss = engines.run(name, size, tables, config)
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.resize_token_embeddings(387)
    for table, values in found.items():
        assert values.shape[0] == 387
        assert torch.equal(torch.tensor(values[:384]), before[table])
        torch.testing.assert_close(
            torch.tensor(values[384:]), model.state_dict()[table][384:], rtol=0, atol=1e-5
        )
        assert values[384:].std(axis=0).max() > 0  # not all the same
    assert 0 < loss < 20


def test_added_tokens_and_chat_template_are_exported(
    base: Path, conversations: Path, tmp_path: Path, brief_runs: None
) -> None:
    (tmp_path / "chatml.jinja").write_text(template("chatml"))
    given = of(base, data__added_tokens=ADDED[:2], data__chat_template=str(tmp_path / "chatml.jinja"))
    final = trained(tmp_path / "run", conversations, **given, data__seq_len=64)
    model, tokens = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert model.config.vocab_size == 386 == len(tokens) == model.get_output_embeddings().weight.shape[0]
    assert tokens("<|im_end|>", add_special_tokens=False)["input_ids"] == [385]


def test_adapter_stores_added_token_rows_of_tied_model(
    conversations: Path, corpus: Path, tmp_path: Path, brief_runs: None
) -> None:
    """The setting that the error suggests trains.

    PEFT loads the adapter, and the merged model computes the same.
    """
    import peft

    from portable.converters.cli import main as convert

    base = trained(tmp_path / "base", corpus)
    settings = of(base, data__added_tokens=ADDED[:2], data__chat_template="chatml", data__seq_len=64)
    settings |= {"train__learning_rate": 1e-2, "adapter__type": "lora"}
    with pytest.raises(UserError, match=r"set adapter.trainable_token_indices: \[384, 385\]$"):
        run_rank("cpu", configured(tmp_path / "run", conversations, **settings))
    settings["adapter__trainable_token_indices"] = [384, 385]
    final, out = trained(tmp_path / "run", conversations, **settings), tmp_path / "merged"
    assert json.loads((final / "adapter_config.json").read_text())["trainable_token_indices"] == [384, 385]
    assert convert([str(final), str(out), "--merge-into", str(base)]) == 0

    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(386)
    loaded: Any = peft.PeftModel.from_pretrained(plain, str(final))
    merged = AutoModelForCausalLM.from_pretrained(out)
    tokens = AutoTokenizer.from_pretrained(out)("<|im_start|>user\nIs it?<|im_end|>\n", return_tensors="pt")
    assert {384, 385} < set(tokens["input_ids"][0].tolist())
    with torch.no_grad():
        wanted = loaded(**tokens).logits
        torch.testing.assert_close(merged(**tokens).logits, wanted, rtol=0, atol=1e-5)
    assert merged.config.tie_word_embeddings and merged.config.vocab_size == 386
    settings["adapter__trainable_token_indices"] = [384, 385, 386]
    with pytest.raises(UserError, match=r"embed_tokens are .*, but each id must .* be at most 385"):
        run_rank("cpu", configured(tmp_path / "x", conversations, **settings))
