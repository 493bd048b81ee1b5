"""Compare texts in padded and packed batches with each text by itself (:mod:`tests.alone`)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.config import RunConfig
from portable.errors import UserError
from portable.model.build import build_model_on_meta, load_model_config
from portable.model.dynamic_rope import check_custom_rotary_layers
from portable.model.padding import explain_padding_dependence
from portable.run.batches import build_train_loader
from tests.alone import TOLERANCE, compare
from tests.architectures import Pair, pairs
from tests.engines import ENGINES, Engines
from tests.parity import opened
from tests.portable.data_support import write_jsonl
from tests.portable.test_preferences import pairs as preferences
from tests.runs import TINY_MODEL, configured

CHOSEN = [
    Pair("phi3", "causal-lm"),  # LongRoPE
    Pair("phi3", "sequence-classification"),
    Pair("phimoe", "causal-lm"),  # scales by the length as well
    Pair("gemma3_text", "causal-lm"),  # rotary embeddings by layer type
    Pair("ministral3", "causal-lm"),  # scales attention by the position
    Pair("llama4_text", "causal-lm"),  # the same, but by the position in the sample
    Pair("doge", "causal-lm"),  # keeps the largest of all keys
    Pair("modernbert", "masked-lm"),
    Pair("t5", "seq2seq-lm"),
]
DEPENDENT = [
    Pair("fnet", "masked-lm"),
    Pair("big_bird", "masked-lm"),
    Pair("t5gemma", "sequence-classification"),
]
REFUSALS = (
    "has not been tested to keep",
    "which carry a state",
    "which have not been tested",
    "attends in both directions",
    "scales attention by the position in the packed sample",
    "computes RoPE from the length of the sample",
    "not run: ",
)


@pytest.mark.parametrize(
    "pair",
    [
        *CHOSEN,
        *(pytest.param(pair, marks=pytest.mark.exhaustive) for pair in pairs() if pair not in CHOSEN),
    ],
    ids=lambda pair: f"{pair.model_type}-{pair.task}",
)
def test_texts_in_batch_equal_single_texts(pair: Pair, tmp_path: Path, corpus: Path) -> None:
    results = dict(compare(pair))
    config = configured(tmp_path, corpus, data__packing=False)
    task = "causal-lm" if pair.task == "composite" else pair.task
    run = config.model_copy(update={"model": config.model.model_copy(update={"task": task})})
    warned = explain_padding_dependence(_Typed(pair.model_type), run) is not None
    for kind, result in results.items():
        if result.refused:
            assert any(reason in result.refused for reason in REFUSALS), (kind, result.refused)
        else:
            assert result.gap < TOLERANCE or warned, (kind, result.gap)
    if pair in CHOSEN:
        compared = {kind for kind, result in results.items() if not result.refused}
        assert len(compared) >= (1 if pair.model_type == "t5" else 2)


class _Typed:
    def __init__(self, model_type: str) -> None:
        self.model_type = model_type


@pytest.mark.parametrize("pair", DEPENDENT, ids=lambda pair: f"{pair.model_type}-{pair.task}")
def test_models_that_depend_on_padding_are_detected(pair: Pair) -> None:
    assert dict(compare(pair))["thresholds padded"].gap > TOLERANCE


LONGROPE: dict[str, Any] = {
    **TINY_MODEL,
    "model_type": "phi3",
    "num_key_value_heads": TINY_MODEL["num_attention_heads"],
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}


def longrope(limit: int) -> dict[str, Any]:
    """Return settings of a tiny Phi-3 that uses the long factors for texts of more than ``limit`` tokens."""
    count = LONGROPE["hidden_size"] // LONGROPE["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * count,
        "long_factor": [1.0 + 8 * number for number in range(count)],
        "original_max_position_embeddings": limit,
    }
    return LONGROPE | {"rope_parameters": rope, "original_max_position_embeddings": limit}


@pytest.mark.parametrize(
    "settings",
    [
        {"data__packing": False},
        {"data__packing": "documents"},
        {"train__loss": "simpo"},
        {"data__packing": False, "memory__activation_checkpointing": "full"},
        {"data__packing": "documents", "memory__loss_chunk_tokens": 16},
    ],
    ids=["padded", "packed", "pairs", "recomputed", "loss in chunks"],
)
@pytest.mark.parametrize("micro", [1, 4])
def test_longrope_factors_follow_each_text(settings: dict[str, Any], micro: int, tmp_path: Path) -> None:
    """The log-probabilities of a step equal the values of transformers for each conversation by itself."""
    limit = 24
    source = write_jsonl(tmp_path / "pairs.jsonl", preferences(24))
    if "train__loss" not in settings:
        rows = [{"messages": row["prompt"] + row["chosen"]} for row in preferences(24)]
        source = write_jsonl(tmp_path / "conversations.jsonl", rows)
    config = configured(
        tmp_path / "run",
        source,
        model__config=longrope(limit),
        data__chat_template="chatml",
        data__seq_len=96,
        data__eval_fraction=0,
        train__global_batch_size=4,
        train__micro_batch_size=micro,
        **settings,
    )
    with opened(config) as trial:
        import transformers

        plain = transformers.AutoModelForCausalLM.from_config(trial.run.model_config).float()
        plain.load_state_dict(trial.engine.model.state_dict())
        batches = build_train_loader(trial.run, 0)
        total, labels, lengths = 0.0, 0, set()
        for _, batch in zip(range(4 // micro), batches, strict=False):
            for ids, targets in texts_of(batch):
                lengths.add(len(ids) > limit)
                with torch.no_grad():
                    log_probs = plain(ids[None]).logits[0].log_softmax(-1)
                valid = targets != -100
                total -= float(log_probs[valid, targets[valid]].sum())
                labels += int(valid.sum())
        assert lengths == {True, False}
        result = trial.step()
        if "train__loss" in settings:
            numbers = trial.read_metrics(result)
            log_probs_sum = -4 * (numbers["logps/chosen"] + numbers["logps/rejected"])
            assert log_probs_sum == pytest.approx(total, rel=1e-5)
        else:
            assert float(result.loss) == pytest.approx(total / labels, rel=1e-5)


def take_longrope_steps(config: RunConfig) -> list[float]:
    with opened(config) as trial:
        results = [trial.step() for _ in range(2)]
        return [
            float(value)
            for result in results
            for value in trial.backend.read_to_host([result.loss, result.grad_norm])
        ]


@pytest.mark.parametrize("packing", [False, "documents"])
@pytest.mark.parametrize("name", ["full_shard", "zero3", "xla", "full_shard, shared"])
def test_longrope_factors_match_on_every_engine(
    name: str, packing: Any, engines: Engines, tmp_path: Path
) -> None:
    rows = [{"messages": row["prompt"] + row["chosen"]} for row in preferences(24)]
    source = write_jsonl(tmp_path / "conversations.jsonl", rows)
    results = []
    for place, size, more in (("no_shard", 1, {}), (name, 2, ENGINES[name].settings)):
        config = configured(
            tmp_path / place,
            source,
            model__config=longrope(24),
            data__chat_template="chatml",
            data__seq_len=96,
            data__packing=packing,
            data__eval_fraction=0,
            train__global_batch_size=4,
            train__micro_batch_size=2,
            **{"strategy": "no_shard", **more},
        )
        results.append(engines.run(place, size, take_longrope_steps, config))
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def texts_of(batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tokens and labels of each text of a batch, without padding."""
    texts = []
    if "document_lengths" in batch:
        rows = (batch[name] for name in ("input_ids", "labels", "position_ids"))
        for ids, labels, positions in zip(*rows, strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, stop in pairwise(starts):
                if stop - start > 1:
                    texts.append((ids[start:stop], labels[start:stop]))
        return texts
    rows = (batch[name].flatten(0, -2) for name in ("input_ids", "labels", "attention_mask"))
    for ids, labels, mask in zip(*rows, strict=True):
        texts.append((ids[mask.bool()], labels[mask.bool()]))
    return texts


def test_padded_targets_with_dynamic_rope_are_rejected(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = {"model_type": "moonshine", "rope_parameters": rope}
    settings = configured(tmp_path, tmp_path, model__config=config).model
    with pytest.raises(
        UserError, match=r"rope_type that depends on the text length, which is unknown for padded targets"
    ):
        load_model_config(settings.model_copy(update={"task": "seq2seq-lm"}))


@pytest.mark.parametrize(
    ("rope", "settings", "refused"),
    [
        ({}, {"data__packing": False}, True),
        ({"rope_type": None, "type": "su"}, {"data__packing": "documents"}, True),
        ({}, {"data__packing": True}, False),
        ({}, {"data__packing": False, "data__seq_len": 24}, False),
        ({"rope_type": "default"}, {"data__packing": False}, False),
    ],
)
def test_custom_rotary_code_that_counts_padding_is_rejected(
    rope: dict[str, Any], settings: dict[str, Any], refused: bool, tmp_path: Path, corpus: Path
) -> None:
    """The rotary embeddings of custom code do not have the attributes of transformers."""
    config = configured(tmp_path, corpus, **{"model__config": longrope(24), "data__seq_len": 96, **settings})
    with torch.device("meta"):
        model = build_model_on_meta(load_model_config(config.model), config.model)
    for module in model.modules():
        if hasattr(module, "rope_type"):
            del module.rope_type
    model.config.rope_parameters = {**model.config.rope_parameters, **rope}
    if not refused:
        check_custom_rotary_layers(model, config)
        return
    with pytest.raises(UserError, match=r"data.seq_len: the custom code of Phi3.* set data.seq_len to .*24"):
        check_custom_rotary_layers(model, config)
