"""Compare every model of transformers that takes text with transformers: ``python -m tests.architectures``.

For each pair of a model type and a task, a tiny model is trained on one rank and on two, and compared with a
plain loop with ``forward(labels=)``. ``from_pretrained`` opens the exported model, which then generates text,
and weights that ``save_pretrained`` wrote are loaded here. A run from a checkpoint is compared with it: names
and untouched tensors of the export, an adapter that peft loads on the published class, and the merged model.
Results are stored in ``tests/architectures.json``, from which ``docs/models.md`` is written. A sweep
continues with the checks that have no result yet.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from portable.config import RunConfig
from portable.run.checkpointing import write_model_files
from tests.composite import build_composite, write_composite
from tests.exports import check_adapter, check_merge, check_names, find_peft_fault, write_source
from tests.parity import opened, take_steps
from tests.ranks import RankError, RankPool
from tests.runs import SENTENCE, configured
from tests.tiny_models import VOCABULARY, tiny_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "architectures.json"
"""Results of every compared pair, with the version of transformers."""
STEPS = 3
TOLERANCE = 1e-5
TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
COMPOSITE = "composite"
"""Causal-LM training of a checkpoint of the class that the hub has for a type."""
NOT_BUILT = "not built: "
PEFT = "peft: "
"""Prefix of a failure that also occurs with only peft and transformers."""
LOSS_CHECKS = ("one rank", "bf16", "full_shard", "zero3", "export", "pretrained")
EXPORT_CHECKS = ("names", "adapter", "merge")
CHECKS = (*LOSS_CHECKS, *EXPORT_CHECKS)
BF16_TOLERANCE = 5e-2


class Pair(NamedTuple):
    """A model type and a task for which transformers has a class."""

    model_type: str
    task: str


def pairs() -> list[Pair]:
    """Return the pairs that transformers' Auto classes of text models have, and the composite types."""
    from transformers.models.auto import modeling_auto

    auto_pairs = [Pair(name, task) for task, names in TASKS.items() for name in getattr(modeling_auto, names)]
    return auto_pairs + [pair for pair in map(_composite_pair, composite_types()) if pair not in auto_pairs]


def composite_types() -> list[str]:
    """Return the types whose published class takes text and other inputs, and is not a causal class."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    multimodal = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return [name for name, class_name in multimodal.items() if causal.get(name) != class_name]


def _composite_pair(model_type: str) -> Pair:
    return Pair(model_type, COMPOSITE)


def write_records(folder: Path) -> Path:
    """Write short texts, each with a target and a label."""
    path = folder / "records.jsonl"
    words = SENTENCE.split()  # with which all tokens of a rank once choose experts without parameters
    with path.open("w", encoding="utf-8") as file:
        for i in range(80):
            text = " ".join(words[(i * 7 + j * (1 + i % 5)) % len(words)] for j in range(12 + (i * 13) % 30))
            file.write(json.dumps({"text": text, "target": text[::-1], "label": f"kind {i % 2}"}) + "\n")
    return path


def run_of(pair: Pair, folder: Path, records: Path, **overrides: Any) -> RunConfig:
    """Return the run of a pair in ``folder``; see :func:`tests.runs.configured`."""
    if pair.task == COMPOSITE:
        source = folder / "source"
        if not source.exists():
            write_composite(source, pair.model_type, records)
        model: dict[str, Any] = {"model__config": None, "model__name_or_path": str(source)}
    else:
        model = {"model__config": tiny_config(*pair), "model__task": pair.task}
    return configured(
        folder,
        records,
        **{
            **model,
            "data__vocab_size": None if pair.task == COMPOSITE else VOCABULARY,
            "data__eval_fraction": 0,
            "train__steps": STEPS,
            "train__global_batch_size": 4,
            "train__micro_batch_size": 2,
            "train__weight_decay": 0.0,
            "train__learning_rate": 1e-3,
            "train__warmup_steps": 0,
            **overrides,
        },
    )


# -- functions of ranks
# ----------------------------------------------------------------------------------------


def auto_class(task: str) -> Any:
    import transformers

    from portable.model.build import AUTO_CLASSES

    return getattr(transformers, AUTO_CLASSES[task])


def plain_model(config: RunConfig, model_config: Any, attention: str) -> Any:
    """Build the model of a run with transformers: from its checkpoint, or with new weights."""
    if (published := published_class(config)) is not None:
        return published.from_pretrained(
            config.model.name_or_path, attn_implementation=attention, dtype=torch.float32
        )
    return auto_class(config.model.task).from_config(
        model_config, attn_implementation=attention, dtype=torch.float32
    )


def published_class(config: RunConfig) -> Any:
    """Return the class that the composite checkpoint of a run names; None for other runs."""
    import transformers

    if config.model.name_or_path is None or not Path(config.model.name_or_path).name.startswith("source"):
        return None
    written = json.loads(Path(config.model.name_or_path, "config.json").read_text("utf-8"))
    return getattr(transformers, written["architectures"][0])


def beside_transformers(config: RunConfig, folder: Path) -> list[tuple[float, float]]:
    """Return the loss of each step here and in a plain loop over the same samples.

    Exports into ``folder``.
    """
    import torch

    from portable.converters import open_checkpoint, write_safetensors
    from portable.data.samples.loader import TrainLoader

    with opened(config) as trial:
        run, task = trial.run, config.model.task
        attention = run.model.config._attn_implementation
        torch.manual_seed(config.seed)
        plain = plain_model(config, run.model_config, attention)
        if getattr(run.model.config.get_text_config(), "output_router_logits", False):
            plain.config.get_text_config().output_router_logits = True
        if plain.config.model_type == "molmo2":  # which is called with the types of the tokens in training
            plain.register_forward_pre_hook(_mark_as_text, with_kwargs=True)
        same_state(trial.engine.model.state_dict(), plain.state_dict())  # as it was initialized
        for part in (plain.config, plain.config.get_text_config()):
            part.use_cache = False
        plain.train()
        optimizer = torch.optim.AdamW(
            plain.parameters(), betas=config.train.betas, eps=config.train.eps, weight_decay=0.0
        )
        size = config.train.global_batch_size
        loader = iter(
            TrainLoader(run.data.train, seed=config.seed, global_batch_size=size, micro_batch_size=size)
        )
        losses = []
        for step in range(STEPS):
            batch = next(loader)
            # The router loss is not a sum over the sequences: transformers computes it for each micro-batch.
            is_split = _router_coefficient(plain) > 0
            rows = run.batch_plan.micro_batch_size if is_split else size
            parts = [{key: value[i : i + rows] for key, value in batch.items()} for i in range(0, size, rows)]
            loss = torch.stack([loss_of(plain, task, part) for part in parts]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), config.train.max_grad_norm or 1.0)
            for group in optimizer.param_groups:
                group["lr"] = run.schedule(step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((float(trial.step().loss), float(loss.detach())))
        loader.close()
        saved = folder / "saved"
        saved.mkdir(parents=True)
        trial.engine.save_shards(saved, background=False)
        write_model_files(run, saved)
        write_safetensors(open_checkpoint(saved), folder / "final")
        torch.save(trial.engine.model.state_dict(), folder / "live.pt")
    return losses


def _mark_as_text(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    ids = arguments[0] if arguments else named["input_ids"]
    return arguments, {**named, "mm_token_type_ids": torch.zeros_like(ids)}


def loss_of(model: Any, task: str, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of ``forward(labels=)`` for one of our batches."""
    import torch
    from torch.nn import functional

    inputs = dict(batch)
    labels = inputs.pop("labels")
    if task == "masked-lm":
        inputs.pop("decoder_input_ids", None)  # transformers makes its own from the labels
    if task != "causal-lm":
        return model(**inputs, labels=labels).loss  # type: ignore[no-any-return]
    ids = inputs["input_ids"]
    logits = model(ids).logits
    plain = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if getattr(model.config, "max_position_embeddings", None) == ids.shape[1]:
        # There is no space for another token: the last label is counted separately.
        shifted = torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], dim=1)
        first, last = ids.shape[1] - 1, functional.cross_entropy(logits[:, -1], labels[:, -1])
        share: torch.Tensor = (model(ids, labels=shifted).loss * first + last) / (first + 1)
        return share
    # Most shift by themselves. The last label is not among the inputs: append it.
    longer = torch.cat([ids, labels[:, -1:]], dim=1)
    shifted = torch.cat([torch.full_like(labels[:, :1], -100), labels], dim=1)
    output = model(longer, labels=shifted)
    if not torch.allclose(output.logits[:, :-1], logits, atol=1e-4):
        return plain  # a model that looks ahead would see its last label
    # The decoders of BART and its kin take labels that are shifted already.
    outputs = [output, model(ids, labels=labels)]

    def compute_distance(output: Any) -> float:
        router_loss = getattr(output, "aux_loss", None)
        terms = 0.0 if router_loss is None else _router_coefficient(model) * float(router_loss.detach())
        return abs(float(output.loss.detach()) - terms - float(plain.detach()))

    best: torch.Tensor = min(outputs, key=compute_distance).loss
    return best


def _router_coefficient(model: Any) -> float:
    text = model.config.get_text_config()
    return float(text.router_aux_loss_coef) if getattr(text, "output_router_logits", False) else 0.0


def opened_again(config: RunConfig, folder: Path) -> None:
    """Load the exported model, compare it with the live model, and generate."""
    import torch
    from safetensors.torch import load_file

    task = config.model.task
    model_class = published_class(config) or auto_class(task)
    model, info = model_class.from_pretrained(folder / "final", dtype=torch.float32, output_loading_info=True)
    amiss = {what: sorted(names) for what, names in info.items() if names}
    if amiss:
        raise AssertionError(f"from_pretrained: {amiss}")
    model.save_pretrained(folder / "again")
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("final", "again"))
    if ours.keys() != theirs.keys():
        raise AssertionError(f"save_pretrained writes other names: {min(ours.keys() ^ theirs.keys())}")
    live = torch.load(folder / "live.pt", weights_only=True)
    try:
        same_state(model.state_dict(), live)
    except AssertionError:
        # Some classes do not load all of their saved values: the row of padding is set to zero.
        plain = type(model)(copy.deepcopy(model.config))
        plain.load_state_dict(live)
        plain.save_pretrained(folder / "theirs")
        again = model_class.from_pretrained(folder / "theirs", dtype=torch.float32)
        same_state(model.state_dict(), again.state_dict())
    if task in ("causal-lm", "seq2seq-lm"):
        fresh = type(model)(copy.deepcopy(model.config))
        fresh.generation_config = model.generation_config
        try:
            generated(fresh)
        except Exception:
            return  # a model that was never trained here cannot either, with these sizes
        generated(model)


def generated(model: Any) -> None:
    """Let a model continue a prompt."""
    import torch

    prompt = torch.arange(4, 12).view(1, -1)
    tokens = model.eval().generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    if tokens.shape[1] < 3:
        raise AssertionError(f"generated {tokens.shape[1]} tokens")


def same_state(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Check that both states have the same bits. Raises AssertionError with names."""
    import torch

    unlike = [
        name for name, tensor in wanted.items() if name not in found or not torch.equal(found[name], tensor)
    ]
    if unlike:
        raise AssertionError(f"{len(unlike)} of {len(wanted)} tensors differ: {', '.join(unlike[:3])}")


def loads_what_transformers_saved(config: RunConfig, folder: Path) -> None:
    """Save unusual weights with ``save_pretrained``, and load them into an engine."""
    import torch

    with opened(config) as trial:
        attention = trial.run.model.config._attn_implementation
        model = plain_model(config, trial.run.model_config, attention)
        trial.run.data.tokenizer.save_pretrained(folder / "theirs")
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder / "theirs")
    model_class = published_class(config) or auto_class(config.model.task)
    taken = config.replaced({"model.config": None, "model.name_or_path": str(folder / "theirs")})
    wanted = model.state_dict()
    if fixed := model._keys_to_ignore_on_save:  # positions that are computed, in no file
        again = model_class.from_pretrained(folder / "theirs", dtype=torch.float32).state_dict()
        wanted |= {name: again[name] for name in wanted if any(re.search(key, name) for key in fixed)}
    with opened(taken) as trial:
        same_state(trial.engine.model.state_dict(), wanted)


# -- the sweep --------------------------------------------------------------------------------------------

Findings = dict[str, str]
"""Result of each check: ``""`` if it holds, or a description of the failure."""


def findings(
    pair: Pair, ranks: RankPool, folder: Path, records: Path, checks: Collection[str] = CHECKS
) -> Findings:
    """Run all checks, or some of ``CHECKS``, for one pair."""
    found: Findings = {}

    def look(name: str, check: Callable[[], str | None]) -> None:
        if name not in checks:
            return
        try:
            found[name] = check() or ""
        except RankError as error:
            found[name] = str(error).strip().splitlines()[-1][:300]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]

    ours: list[float] = []

    def apart(pairs: list[tuple[float, float]], tolerance: float = TOLERANCE) -> str | None:
        worst = max(abs(one - other) / max(abs(other), 1e-9) for one, other in pairs)
        return None if worst < tolerance else f"a loss is {worst:.1e} off"

    def alone() -> str | None:
        both = ranks.run(1, beside_transformers, run_of(pair, folder, records), folder, timeout=120)
        ours.extend(one for one, _ in both)
        return apart(both)

    def two(strategy: str) -> str | None:
        config = run_of(pair, folder, records, strategy=strategy)
        return apart(
            list(zip(ranks.run(2, take_steps, config, STEPS, timeout=120).losses, ours, strict=True))
        )

    def bf16() -> str | None:
        config = run_of(pair, folder, records, precision="bf16")
        losses = ranks.run(1, take_steps, config, STEPS, timeout=120).losses
        return apart(list(zip(losses, ours, strict=True)), BF16_TOLERANCE)

    try:
        config = run_of(pair, folder, records)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return {"one rank": f"{NOT_BUILT}{type(error).__name__}: {reason}"[:300]}
    look("one rank", alone)
    if ours:
        look("bf16", bf16)
        look("full_shard", lambda: two("full_shard"))
        look("zero3", lambda: two("zero3"))
        look("export", lambda: ranks.run(1, opened_again, config, folder, timeout=120))
        look("pretrained", lambda: ranks.run(1, loads_what_transformers_saved, config, folder, timeout=120))
    if ours or "one rank" not in checks:
        try:
            found |= ranks.run(1, export_findings, pair, folder, records, checks, timeout=240)
        except RankError as error:
            reason = str(error).strip().splitlines()[-1][:300]
            found |= {check: reason for check in EXPORT_CHECKS if check in checks}
    return found


def export_findings(pair: Pair, folder: Path, records: Path, checks: Collection[str]) -> Findings:
    """Run the checks of :mod:`tests.exports` for a pair on one rank, and return their results."""
    task = "causal-lm" if pair.task == COMPOSITE else pair.task
    results: Findings = {}

    def look(name: str, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
            results[name] = ""
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0].replace(f"{folder}/", "")
            results[name] = f"{type(error).__name__}: {reason}"[:300]

    if not set(checks) & set(EXPORT_CHECKS):
        return results
    model = build_plain(pair)
    source = write_source(folder / "base", model, records, task)
    if "adapter" in checks:
        look("adapter", check_adapter, folder / "lora", source, records, task)
        if results["adapter"].startswith("ExportError") and (
            fault := find_peft_fault(folder / "peft", source)
        ):
            results["adapter"] = f"{PEFT}{fault}"
    amiss = results.get("adapter", "")
    if "merge" in checks and (not amiss or amiss.startswith(PEFT)):
        look("merge", check_merge, folder / "lora", source)
    if "names" in checks:
        source = write_source(folder / "bf16", model, records, task, dtype=torch.bfloat16)
        look("names", check_names, folder / "names", source, records, task)
    shutil.rmtree(folder, ignore_errors=True)
    return results


def build_plain(pair: Pair) -> Any:
    """Build the tiny model of a pair with transformers, in the class that published checkpoints have."""
    from transformers import AutoConfig

    if pair.task == COMPOSITE:
        return build_composite(pair.model_type)
    settings = tiny_config(*pair)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if pair.task == "sequence-classification":
        # The labels of the data. transformers does not save the default names of two classes, although BART
        # has three classes by default.
        config.id2label, config.label2id = {0: "kind 0", 1: "kind 1"}, {"kind 0": 0, "kind 1": 1}
    torch.manual_seed(1)
    return auto_class(pair.task).from_config(config, dtype=torch.float32)


INTRODUCTION = """# Models

This page lists the models that you can train. To check a single model, describe its run without training:

<!-- needs: the hub -->
```sh
portable-train --model.name_or_path Qwen/Qwen3-0.6B --data.source texts.jsonl --dry-run
```

If the model is not supported, the command prints an error with the reason. To look up a model here:

1. If it belongs to a popular family, find it in [Popular families](#popular-families).
2. Otherwise, find its `model_type`, either in the model's `config.json` or in [Find the type of a
   model](#find-the-type-of-a-model).
3. Find this type in [Results by type](#results-by-type). If a check failed, [Known
   failures](#known-failures) has the reason.

## Checks of each model

`python -m tests.architectures` trains a tiny model of each type with random weights, exports it, and
compares it with transformers {version}. It has tested {looked_at} of {known} pairs of a model type and a
task. The task is the value of [`model.task`](train.md#classifiers-and-encoder-decoders), or "composite".
Composite models also accept images or audio. In these tests, they are trained as causal language models on
text (see [multimodal models](train.md#multimodal-models)). [Images](images.md) are tested separately.

The tables on this page contain one column for each check:

| check | compared values | pairs with a result |
| --- | --- | --- |
{checks}

"""
COLUMNS = {
    "loss": ("one rank",),
    "bf16": ("bf16",),
    "ranks": ("full_shard", "zero3"),
    "reload": ("export", "pretrained"),
    "names": ("names",),
    "adapter": ("adapter",),
    "merge": ("merge",),
}
"""Columns of the table, and the checks that each consists of."""
DESCRIPTIONS = {
    "loss": f"the losses of {STEPS} fp32 steps in a run and in a plain training loop that calls "
    f"`forward(labels=)`, within {TOLERANCE:.0e}",
    "bf16": f"the losses in bf16 and in fp32, within {BF16_TOLERANCE:.0%}",
    "ranks": "the losses on two ranks (with `full_shard` and `zero3`) and on one rank, within "
    f"{TOLERANCE:.0e}",
    "reload": "the weights before and after loading, bit for bit, when `from_pretrained` loads exported "
    "weights and when a run loads a `save_pretrained` checkpoint",
    "names": "the tensors in `final/` and in the checkpoint that the run started from: the names and shapes "
    "of all tensors, and the dtypes and bytes of the tensors that were not trained. The model card must list "
    "every tensor that is not exported",
    "adapter": "the logits during training and the logits after peft loads the adapter into the published "
    f"model class, within {TOLERANCE:.0e}",
    "merge": "the names, shapes, and dtypes of the merged model and its base, and the logits of the merged "
    "and the trained model",
}
TABLE = """\
| mark | meaning |
| --- | --- |
| ✓ | the check passed |
| ✗ | the check failed |
| ○ | the model is not supported, or peft fails (see [Known failures](#known-failures)) |
| – | the check was not run |

Model types with the same results share a row:

"""
NOTES = """\
The list at the end of this section contains the model types and tasks, the check that failed, and the
beginning of the error message. The list uses the names of the individual tests: "one rank" belongs to the
loss check, "full_shard" and "zero3" to the ranks check, and "export" to the reload check. In two cases, a
label replaces the name of the check:

- "refused": the run ends with an error before training. Either the model cannot be trained for the task,
  although transformers lists the model for it, or the class of the model requires inputs other than text.
- "not tried": the test could not build a small model of this type.

In some cases, transformers itself fails:

- `deberta` and `xmod` fail under bf16 autocast.
- `git` fails if there are labels but no images.
- For `emu3` and `mllama`, the auto class cannot load files that it has saved. The class in `config.json` can.

ProphetNet fails the loss check because a run trains it only on the next token. The run prints a note.

These checks failed:
"""
FAMILIES = {
    "Llama 3, SmolLM, Yi": "llama causal-lm",
    "Llama 4": "llama4 composite",
    "Mistral 7B": "mistral causal-lm",
    "Mistral Small 3, Devstral": "mistral3 composite",
    "Mistral Small 4": "mistral4 composite",
    "Mixtral": "mixtral causal-lm",
    "Qwen3": "qwen3 causal-lm",
    "Qwen3-MoE": "qwen3_moe causal-lm",
    "Qwen3-Next": "qwen3_next causal-lm",
    "Qwen3.5": "qwen3_5 composite",
    "Qwen3.5-MoE": "qwen3_5_moe composite",
    "Qwen2.5-VL": "qwen2_5_vl composite",
    "Qwen3-VL": "qwen3_vl composite",
    "Qwen3-VL-MoE": "qwen3_vl_moe composite",
    "Gemma 3 270M, 1B": "gemma3_text causal-lm",
    "Gemma 3 4B to 27B": "gemma3 causal-lm",
    "Gemma 3n": "gemma3n causal-lm",
    "Gemma 4": "gemma4 causal-lm",
    "Phi-3, Phi-4": "phi3 causal-lm",
    "Phi-3.5-MoE": "phimoe causal-lm",
    "Phi-4 multimodal": "phi4_multimodal causal-lm",
    "DeepSeek-V3, DeepSeek-R1, Kimi K2": "deepseek_v3 causal-lm",
    "DeepSeek-V3.2": "deepseek_v32 causal-lm",
    "DeepSeek-V4": "deepseek_v4 causal-lm",
    "Kimi K2.5": "kimi_k25 composite",
    "Kimi Linear": "kimi_linear causal-lm",
    "GLM-4.5, GLM-4.6": "glm4_moe causal-lm",
    "GLM-4.5V": "glm4v_moe composite",
    "GLM-4.6V": "glm46v composite",
    "GLM-5": "glm_moe_dsa causal-lm",
    "MiniMax M2": "minimax_m2 causal-lm",
    "MiniMax M3": "minimax_m3_vl composite",
    "GPT-OSS": "gpt_oss causal-lm",
    "Hunyuan 3": "hy_v3 causal-lm",
    "ERNIE 4.5 MoE": "ernie4_5_moe causal-lm",
    "Nemotron-H": "nemotron_h causal-lm",
    "Granite 4": "granitemoehybrid causal-lm",
    "Falcon-H1": "falcon_h1 causal-lm",
    "LFM2": "lfm2 causal-lm",
    "LFM2-VL": "lfm2_vl composite",
    "OLMo 3": "olmo3 causal-lm",
    "OLMo hybrid": "olmo_hybrid causal-lm",
    "SmolLM3": "smollm3 causal-lm",
    "SmolVLM": "smolvlm composite",
    "InternVL": "internvl composite",
    "Pixtral, LLaVA": "llava composite",
    "T5, Flan-T5": "t5 seq2seq-lm",
    "BERT": "bert masked-lm",
}
"""Pair of each popular family: the one of its published class."""
_REFUSED = re.compile(
    r"UserError: model\.task|not run on only text|not run with only text|requires inputs other|"
    r"cannot build .* for model\.task|does not predict the next token|does not generate text|"
    "attends in both directions"
)
_EXPLAINED = re.compile(
    f"{PEFT}|.* changes.*; if the layers|UserError: adapter.target_modules: all-linear matches no|"
    ".*zero3 does not support"
)
"""Results that are not a failure of the run: a fault of peft, or a refusal with its reason."""


def page(everything: Mapping[str, Findings]) -> str:
    """Build the page of the docs: the table by name, the results of each type, and the failures."""
    import transformers

    rows: dict[tuple[str, ...], list[str]] = {}
    notes: dict[str, list[str]] = {}
    for name, results in sorted(everything.items()):
        model_type, task = name.split()
        amiss = {what: why.replace("portable.errors.", "") for what, why in results.items() if why}
        word = _describe_refusal(amiss)
        if word is None:
            marks = tuple(_mark(results, required) for required in COLUMNS.values())
            rows.setdefault((task, *marks), []).append(f"`{model_type}`")
        for what, why in amiss.items():
            plain = (
                why.removeprefix(NOT_BUILT)
                .removeprefix("UserError: ")
                .replace("`", "")
                .replace(f" {model_type} ", " it ")
            )
            said = f"{word or what}: `{textwrap.shorten(plain, 90, placeholder=' ...')}`"
            notes.setdefault(said, []).append(f"`{model_type}` {task}")
    by_name = (
        PAGE.read_text("utf-8").partition("## Find the type of a model")[2].partition("## Results by type")[0]
    )
    lines = ["## Popular families", "", f"| family | task | {' | '.join(COLUMNS)} |"]
    lines += [f"|{' --- |' * (len(COLUMNS) + 2)}"]
    for family, pair in FAMILIES.items():
        results = everything.get(pair, {})
        cells = " | ".join(_mark(results, required) for required in COLUMNS.values())
        lines.append(f"| {family} | {pair.split()[1]} | {cells} |")
    lines += ["", f"## Find the type of a model{by_name}## Results by type", "", TABLE.rstrip(), ""]
    lines += [f"| task | {' | '.join(COLUMNS)} | types |", f"|{' --- |' * (len(COLUMNS) + 2)}"]
    order = [*TASKS, COMPOSITE]
    for row in sorted(rows, key=lambda row: (order.index(row[0]), -len(rows[row]), row)):
        lines.append(f"| {' | '.join(row)} | {', '.join(rows[row])} |")
    lines += ["", "## Known failures", "", NOTES]
    lines += [f"- {', '.join(names)}: {line}" for line, names in sorted(notes.items())]
    trained = [results for results in everything.values() if _describe_refusal(results) is None]
    descriptions = []
    for column, required in COLUMNS.items():
        count = sum(_mark(results, required) != "–" for results in trained)
        descriptions.append(f"| {column} | {DESCRIPTIONS[column]} | {count} |")
    introduction = INTRODUCTION.format(
        version=transformers.__version__,
        looked_at=len(everything),
        known=len(pairs()),
        checks="\n".join(descriptions),
    )
    return introduction + "\n".join(lines) + "\n"


def _describe_refusal(amiss: Findings) -> str | None:
    """Return "refused" or "not tried" if a pair was not trained for this reason, otherwise None."""
    alone = amiss.get("one rank", "")
    if _REFUSED.search(alone):
        return "refused"
    if alone.startswith(NOT_BUILT) or "UserError: model" in alone or "UserError: data.tokenizer" in alone:
        return "not tried"
    return None


def _mark(results: Findings, checks: Collection[str]) -> str:
    amiss = [why for check in checks if (why := results.get(check))]
    if amiss:
        return "○" if all(_EXPLAINED.match(why) for why in amiss) else "✗"
    return "✓" if all(check in results for check in checks) else "–"


def _is_complete(results: Findings | None, checks: Collection[str]) -> bool:
    """Return whether a pair has these results: a check that failed ends the checks that depend on it."""
    if results is None:
        return False
    if _describe_refusal(results):
        return True
    dependent = {"one rank": LOSS_CHECKS[1:], "adapter": ("merge",)}
    ended = {check for first, others in dependent.items() if results.get(first) for check in others}
    return set(checks) <= results.keys() | ended


def read_results() -> dict[str, Findings]:
    """Read the stored results, or none if they are from another version of transformers."""
    import transformers

    stored = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return dict(stored["pairs"]) if stored.get("transformers") == transformers.__version__ else {}


def write_results(everything: Mapping[str, Findings]) -> None:
    """Store results, one line for each pair."""
    import transformers

    lines = [f" {json.dumps(name)}: {json.dumps(results)}" for name, results in sorted(everything.items())]
    version = json.dumps(transformers.__version__)
    text = f'{{"transformers": {version}, "pairs": {{\n' + ",\n".join(lines) + "\n}}\n"
    RESULTS.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run the checks that have no stored result, print one line for each pair, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--task", choices=[*TASKS, COMPOSITE])
    parser.add_argument(
        "--checks",
        type=lambda text: text.split(","),
        default=CHECKS,
        help="all by default: " + ",".join(CHECKS),
    )
    parser.add_argument("--again", action="store_true", help="also run checks that have a stored result")
    parser.add_argument("--page", action="store_true", help="only write the page from the stored results")
    chosen = parser.parse_args(arguments)
    everything = read_results()
    wanted = [
        pair
        for pair in pairs()
        if not chosen.page
        and (not chosen.types or pair.model_type in chosen.types)
        and chosen.task in (None, pair.task)
        and (chosen.again or not _is_complete(everything.get(" ".join(pair)), chosen.checks))
    ]
    pool = RankPool()
    failed = False
    with tempfile.TemporaryDirectory() as root:
        records = write_records(Path(root))
        for number, pair in enumerate(wanted):
            start = time.monotonic()
            results = findings(pair, pool, Path(root, str(number)), records, chosen.checks)
            amiss = "; ".join(f"{what}: {why}" for what, why in results.items() if why) or "ok"
            failed = failed or amiss != "ok"
            print(f"{pair.model_type} {pair.task} ({time.monotonic() - start:.1f} s): {amiss}", flush=True)
            everything = read_results()  # another process may have added results
            stored = {} if _describe_refusal(results) else everything.get(" ".join(pair), {})
            everything[" ".join(pair)] = {**stored, **results}
            write_results(everything)
    pool.close()
    PAGE.write_text(page(everything), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
