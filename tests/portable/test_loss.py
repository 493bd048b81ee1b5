"""Additions of a model's ``forward(labels=...)`` to the cross-entropy: router losses and z-losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from portable.batch import IGNORED_LABEL
from portable.data.dataset import build_data
from portable.errors import UserError
from portable.evaluation.metrics import LOSS_ONLY
from portable.model.build import AUTO_CLASSES, load_model_config
from portable.model.chunked_loss import install_chunked_head
from portable.model.loss import (
    RETURNED_WEIGHT,
    LossOutput,
    TrainingObjective,
    compute_summed_cross_entropy,
    forward_loss,
    scale_loss_by_global_weight,
)
from portable.run.batches import build_train_loader
from tests.engines import ENGINES, Engines
from tests.gpu.test_parity import Losses, assert_close, our_losses
from tests.parity import opened
from tests.portable.data_support import write_jsonl
from tests.portable.test_preferences import pairs
from tests.runs import TINY_MODEL, configured
from tests.tiny_models import tiny_config
from tests.tpu.test_parity import MODELS as TINY

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
ROUTED: dict[str, Any] = {**SMALL, "output_router_logits": True, "router_aux_loss_coef": 0.3}

CAUSAL: dict[str, dict[str, Any]] = {
    "mixtral": {**ROUTED, "num_local_experts": 4},

    "gpt_oss": {**ROUTED, "num_local_experts": 4, "head_dim": 8},
    "jetmoe": {**ROUTED, "num_local_experts": 4, "kv_channels": 8, "aux_loss_coef": 0.2},
    "bamba": {
        **SMALL, "z_loss_coefficient": 0.1, "mamba_n_heads": 4, "mamba_d_head": 8, "attn_layer_indices": [1]
    },
}  # fmt: skip
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "switch_transformers": {
        "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_experts": 4,
        "num_layers": 4, "num_decoder_layers": 4, "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2, "dropout_rate": 0.0, "router_jitter_noise": 0.0,
        "output_router_logits": True, "router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.1,
    },
}  # fmt: skip
MODELS = {**dict.fromkeys(CAUSAL, "causal-lm"), **dict.fromkeys(SEQ2SEQ, "seq2seq-lm")}


def built(model_type: str, **changes: Any) -> PreTrainedModel:
    task = MODELS.get(model_type, "causal-lm")
    settings = {**(CAUSAL | SEQ2SEQ).get(model_type, SMALL), **changes}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    model: PreTrainedModel = getattr(transformers, AUTO_CLASSES[task]).from_config(config)
    model.config.use_cache = False
    model.train()
    return model


def inputs(task: str, rows: int = 3) -> dict[str, Tensor]:
    """Return a micro-batch as in the data: every other row is padded, labels are aligned with the logits."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (rows, 10), generator=generator)
    mask = torch.ones(rows, 9, dtype=torch.int64)
    mask[::2, 6:] = 0
    labels = tokens[:, 1:].masked_fill(mask == 0, IGNORED_LABEL)
    batch = {"input_ids": tokens[:, :-1], "attention_mask": mask, "labels": labels}
    return batch | ({"decoder_input_ids": tokens[:, :-1].flip(1)} if task == "seq2seq-lm" else {})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def loss_of(
    objective: TrainingObjective, model: nn.Module, batch: dict[str, Tensor], valid: Tensor
) -> Tensor:
    output = forward_loss(model, batch, objective)
    return scale_loss_by_global_weight(output, valid, objective.global_batch_size)[0]


@pytest.mark.parametrize("weight", [0, 3])
def test_returned_weight_of_step_adds_up_to_one(weight: int) -> None:
    """A step without labels is not an error of the loss, which returns the declared weight 0."""
    output = LossOutput(torch.zeros(()), num_sequences=2, weight=torch.tensor(float(weight)))
    total = torch.tensor(2.0 * weight)
    sums = [scale_loss_by_global_weight(output, total, 4).sums for _ in range(2)]
    assert sums[0].names == (RETURNED_WEIGHT,)
    assert [float(sum(step.values[index] for step in sums)) for index in (0, 1)] == [0, 1]


def transformers_own(model: PreTrainedModel, batch: dict[str, Tensor], task: str) -> Tensor:
    """Compute the loss of transformers for a micro-batch. Its shifted labels are our aligned labels."""
    more: dict[str, Any] = {"shift_labels": batch["labels"]} if task == "causal-lm" else {}
    if "switch" in model.config.model_type:  # ignores its config
        more["output_router_logits"] = model.config.output_router_logits
    loss: Tensor = model(**batch, **more).loss
    return loss


@pytest.mark.parametrize("model_type", MODELS)
def test_loss_of_micro_batch_matches_transformers(model_type: str) -> None:
    task = MODELS[model_type]
    model, batch = built(model_type), inputs(MODELS[model_type])
    truth = transformers_own(model, batch, task)
    truth.backward()
    expected = gradients(model)
    valid = (batch["labels"] != IGNORED_LABEL).sum()
    loss = loss_of(TrainingObjective(model, len(batch["labels"])), model, batch, valid)
    loss.backward()
    torch.testing.assert_close(loss, truth, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-7)
    alone = compute_summed_cross_entropy(model, batch) / valid
    assert loss > alone + 0.05  # something is added, and the cross-entropy is without it


@pytest.mark.parametrize("model_type", ["mixtral", "switch_transformers", "bamba"])
def test_added_loss_of_global_batch_is_mean_over_sequences(model_type: str) -> None:
    """The micro-batches differ in size and in the number of labels."""
    task = MODELS[model_type]
    model, batch = built(model_type), inputs(task, rows=4)
    micro_batches = [{name: t[part] for name, t in batch.items()} for part in (slice(0, 3), slice(3, 4))]
    valid = (batch["labels"] != IGNORED_LABEL).sum()
    objective = TrainingObjective(model, 4)
    for micro_batch in micro_batches:
        loss_of(objective, model, micro_batch, valid).backward()
    found = gradients(model)
    for micro_batch, share in zip(micro_batches, (3 / 4, 1 / 4), strict=True):
        logits = model(**{name: t for name, t in micro_batch.items() if name != "labels"}).logits
        labels = micro_batch["labels"]
        mean = functional.cross_entropy(logits.view(-1, 64), labels.view(-1))
        added = transformers_own(model, micro_batch, task) - mean
        (mean * ((labels != IGNORED_LABEL).sum() / valid) + added * share).backward()
    torch.testing.assert_close(found, gradients(model), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "off"),
    [
        ("mixtral", {"output_router_logits": False}),
        ("switch_transformers", {"output_router_logits": False}),
        ("bamba", {"z_loss_coefficient": 0.0}),
        ("llama", {}),
    ],
)
def test_added_loss_is_off_unless_config_enables_it(model_type: str, off: dict[str, Any]) -> None:
    """A chunked head returns losses instead of logits, for which a z-loss would be meaningless."""
    batch = inputs(MODELS.get(model_type, "causal-lm"))
    model, valid = built(model_type, **off), torch.tensor(7)
    assert loss_of(TrainingObjective(model, 3), model, batch, valid).equal(
        compute_summed_cross_entropy(model, batch) / valid
    )
    if model_type == "bamba":
        assert (
            install_chunked_head(model, "auto") is not None
            and install_chunked_head(built("bamba"), "auto") is None
        )


ROWS: dict[str, Any] = {
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "model__config": TINY["mixtral"]["model__config"]
    | {"output_router_logits": True, "router_aux_loss_coef": 0.3},
}


def test_first_step_with_router_loss_matches_transformers(tmp_path: Path, corpus: Path) -> None:
    """The step has four micro-batches of one packed sequence each, whose losses are averaged."""
    config = configured(tmp_path, corpus, **ROWS)
    with opened(config) as trial:
        model = transformers.AutoModelForCausalLM.from_config(trial.run.model_config)
        model.load_state_dict(trial.engine.model.state_dict())
        rows = [next(iter(build_train_loader(trial.run, first))) for first in range(4)]
        losses = [model(**row, shift_labels=row["labels"]).loss for row in rows]
        truth = torch.stack(losses).mean()
        truth.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        step = trial.step()
        torch.testing.assert_close(step.loss, truth, rtol=1e-6, atol=0)
        torch.testing.assert_close(step.grad_norm, norm, rtol=1e-5, atol=0)
        # An evaluation reports only the cross-entropy.
        batch = trial.backend.copy_to_device(rows[0])
        labels = int((rows[0]["labels"] != IGNORED_LABEL).sum())
        alone = compute_summed_cross_entropy(trial.engine.model, batch) / labels
        evaluated = trial.engine.evaluate_batch(batch, LOSS_ONLY, {})["loss"] / labels
        torch.testing.assert_close(evaluated.float(), alone.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("packing", "seq_len"), [(False, 48), (False, 96), ("documents", 80), ("documents", 96)]
)
@pytest.mark.parametrize(
    "model_type",
    [
        "mixtral",
        "gpt_oss",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe")
        ),
    ],
)
def test_router_loss_ignores_padding(model_type: str, packing: Any, seq_len: int, tmp_path: Path) -> None:
    """The router loss equals the loss of transformers for all tokens of each conversation."""
    rows = [{"messages": row["prompt"] + row["chosen"]} for row in pairs(2)]
    settings = CAUSAL.get(model_type)
    if settings is None:
        settings = tiny_config(model_type, "causal-lm") | ROUTED
        settings |= {name: 4 for name in ("num_experts", "num_local_experts") if name in settings}
    config = configured(
        tmp_path / "run",
        write_jsonl(tmp_path / "conversations.jsonl", rows),
        model__config={
            **settings,
            "model_type": model_type,
            "vocab_size": 400,
            "max_position_embeddings": 96,
        },
        data__chat_template="chatml",
        data__packing=packing,
        data__seq_len=seq_len,
        data__eval_fraction=0,
        train__global_batch_size=2 if packing is False else 1,
        train__micro_batch_size=2 if packing is False else 1,
    )
    with opened(config) as trial:
        plain = transformers.AutoModelForCausalLM.from_config(trial.run.model_config).float()
        plain.load_state_dict(trial.engine.model.state_dict())
        cache, gates, total, labels = trial.run.data.first_tokens, [], 0.0, 0
        with torch.no_grad():
            for number in range(2):
                ids = torch.from_numpy(cache.read_document("text", number).astype("int64"))
                mask: Any = cache.read_trained_mask("text", number)
                trained = torch.from_numpy(mask.copy())[1:]
                output = plain(ids[None], output_router_logits=True)
                log_probs = output.logits[0, :-1].log_softmax(-1)
                total -= float(log_probs[trained, ids[1:][trained]].sum())
                labels += int(trained.sum())
                gates.append(output.router_logits)
            together = tuple(torch.cat(layer) for layer in zip(*gates, strict=True))
            module: Any = __import__(type(plain).__module__, fromlist=["load_balancing_loss_func"])
            router = module.load_balancing_loss_func(together, 4, plain.num_experts_per_tok)
        wanted = total / labels + plain.router_aux_loss_coef * float(router)
        assert float(trial.step().loss) == pytest.approx(wanted, rel=1e-5)


RECOMPUTED = "memory__activation_checkpointing"


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[int], Losses]:
    """Return a function of the micro-batch size that trains on one rank.

    With two sequences per micro-batch, the learning rate of the first step is 0.
    """

    @cache
    def of(micro: int) -> Losses:
        given = {**ROWS, "train__micro_batch_size": micro, "train__warmup_steps": micro - 1}
        return our_losses(configured(tmp_path_factory.mktemp("truth"), corpus, **given))

    return of


@pytest.mark.parametrize(
    ("name", "own", "micro"),
    [
        ("no_shard", {}, 1),
        ("full_shard", {"memory__loss_chunk_tokens": 5}, 1),
        ("full_shard", {RECOMPUTED: "selective"}, 1),
        ("zero3", {RECOMPUTED: "full"}, 1),
        # Two devices take two sequences at a time as one micro-batch.
        ("xla", {"train__warmup_steps": 1}, 2),
    ],
)
def test_router_loss_matches_on_every_engine(
    name: str, own: dict[str, Any], micro: int, truth: Any, tmp_path: Path, corpus: Path, engines: Engines
) -> None:
    config = configured(tmp_path, corpus, **ROWS, **ENGINES[name].settings, **own)
    assert_close(engines.run(name, 2, our_losses, config), truth(micro), 1e-5, falls=0.2 / micro)
    assert truth(micro)[0][0] > 6.5


# -- a pretrained model's config ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "router"),
    [({}, True), ({"output_router_logits": False}, False), ({"router_aux_loss_coef": 0.0}, False)],
)
def test_router_loss_of_pretrained_model_is_on(
    own: dict[str, Any], router: bool, tmp_path: Path, corpus: Path
) -> None:
    """As in TRL's trainers, the coefficient is the model's, regardless of the switch in its config.json."""
    made = configured(tmp_path, corpus, model__config=TINY_MODEL)
    build_data(made.data, model_vocab_size=384).tokenizer.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    settings = {**CAUSAL["mixtral"], "vocab_size": 384, "output_router_logits": False}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **settings))
    model.save_pretrained(tmp_path / "base")
    named = {"model__name_or_path": str(tmp_path / "base"), "model__config": own or None}
    config = configured(tmp_path / "run", corpus, **named, train__micro_batch_size=6)
    with opened(config) as trial:
        batch = next(trial.batches)
        loader, trial.batches = trial.batches, cast("Any", iter([batch]))
        with torch.no_grad():
            output = model(batch["input_ids"], output_router_logits=True)
        plain = functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
        truth = plain + (0.3 * output.aux_loss if router else 0)
        assert float(trial.step().loss) == pytest.approx(float(truth), rel=1e-6)
        trial.batches = loader
        assert any("router_aux_loss_coef (0.3)" in note for note in trial.run.notes) == router


def test_model_config_overrides_pretrained_config(tmp_path: Path, corpus: Path) -> None:
    AutoConfig.for_model(**TINY_MODEL).save_pretrained(tmp_path)

    def found(**own: Any) -> Any:
        named = {"model__name_or_path": str(tmp_path), "model__config": own}
        return load_model_config(configured(tmp_path / "run", corpus, **named).model)

    taken = found(hidden_act="gelu", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert taken.hidden_act == "gelu"
    assert taken.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for own, told in (
        (
            {"tie_word_embeddings": False},
            r"^model\.config: tie_word_embeddings would change the shapes or the tying",
        ),
        ({"atention_dropout": 0.1}, r"atention_dropout: LlamaConfig has no such setting; did you mean att"),
    ):
        with pytest.raises(UserError, match=told):
            found(**own)


# -- metrics logged with the loss
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, 7])
@pytest.mark.parametrize("loss", [None, "smooth", "simpo"])
def test_accuracy_and_entropy_match_manual_computation(
    loss: str | None, chunks: int, corpus: Path, tmp_path: Path
) -> None:
    """The metrics have TRL's names, and cover all labels of the global batch.

    Pairs count the chosen answers.
    """
    settings: dict[str, Any] = {"data__packing": False, "train__micro_batch_size": 2}
    settings |= {"train__label_smoothing": 0.1} if loss == "smooth" else {}
    if loss == "simpo":
        source = str(write_jsonl(tmp_path / "pairs.jsonl", pairs(40)))
        settings |= {"data__source": source, "data__chat_template": "chatml", "train__loss": "simpo"}
    config = configured(tmp_path / "run", corpus, **settings, memory__loss_chunk_tokens=chunks)
    with opened(config) as trial:
        batches = [next(trial.batches) for _ in range(3)]
        loader, trial.batches = trial.batches, cast("Any", iter(batches))
        hits = count = entropy = labelled = 0.0
        for batch in batches:
            ids, mask, labels = (
                batch[name].flatten(0, -2) for name in ("input_ids", "attention_mask", "labels")
            )
            with torch.no_grad():
                log_p = trial.engine.model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
            first = slice(None, None, 2 if loss == "simpo" else 1)
            hits += int((log_p.argmax(-1) == labels)[first].sum())
            count += int((labels != IGNORED_LABEL)[first].sum())
            entropy += float(-(log_p.exp() * log_p).sum(-1)[labels != IGNORED_LABEL].sum())
            labelled += int((labels != IGNORED_LABEL).sum())
        result = trial.step()
        trial.batches = loader
        found = trial.read_metrics(result)
        assert found["mean_token_accuracy"] == pytest.approx(hits / count, rel=1e-6)
        if not chunks:
            assert found["entropy"] == pytest.approx(entropy / labelled, rel=1e-5)
        assert ("entropy" in found) == (not chunks) and not any("labels" in name for name in found)
