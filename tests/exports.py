"""Checks of the exported files of a run, for any model type: names, untouched tensors, adapters and merges.

Each check starts from a folder that ``save_pretrained`` wrote, with the class of published checkpoints.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from portable.config import RunConfig
from portable.converters import find_adapter, merge, open_checkpoint, write_safetensors
from tests.parity import opened
from tests.published_names import iterate_configs
from tests.runs import configured
from tests.tiny_models import VOCABULARY

TOLERANCE = 1e-5
NOT_LOADED = "mtp.spare.weight"
"""Name of a tensor that no class loads, such as the layers for multi-token prediction."""
_STEPS = 2


class ExportError(AssertionError):
    """A check that does not hold."""


def write_source(
    folder: Path, model: Any, corpus: Path, task: str = "causal-lm", *, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a model without initial values as a checkpoint with a tokenizer, and one tensor of no class.

    Args:
        folder: Folder to write to.
        model: Model of transformers, which is modified.
        corpus: Text file on which the tokenizer is trained.
        task: Task of the run. It determines the tokenizer's special tokens.
        dtype: Dtype of the written weights.

    Returns:
        The folder.
    """
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.to(dtype)
    model.config.dtype = dtype
    vocab_size = getattr(model.config.get_text_config(), "vocab_size", VOCABULARY)  # CANINE has none
    tokenizer = _build_tokenizer(vocab_size, corpus, task)
    if task == "sequence-classification":  # the position of the class depends on these tokens
        for _, config in iterate_configs(model.config, ()):
            config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
            config.bos_token_id = tokenizer.bos_token_id
            config.decoder_start_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), NOT_LOADED: torch.ones(3, 5, dtype=dtype)}, path, {"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


@lru_cache(8)
def _build_tokenizer(vocab_size: int, corpus: Path, task: str) -> Any:
    from portable.data.dataset import build_data

    ends_texts = task == "sequence-classification"  # BART classifies at the end-of-text token
    task = task if task == "masked-lm" else "causal-lm"
    settings = configured(corpus.parent, corpus).data
    return build_data(settings, task=task, model_vocab_size=vocab_size, ends_texts=ends_texts).tokenizer


def _configure_run(folder: Path, source: Path, corpus: Path, task: str, **settings: Any) -> RunConfig:
    return configured(
        folder,
        corpus,
        **{
            "model__config": None,
            "model__name_or_path": str(source),
            "model__task": task,
            "strategy": "no_shard",
            "data__eval_fraction": 0,
            "train__steps": _STEPS,
            "train__global_batch_size": 2,
            "train__weight_decay": 0.1,
            "checkpoint__every_steps": None,
            "log__sample_tokens": 0,
            **settings,
        },
    )


def check_names(folder: Path, source: Path, corpus: Path, task: str) -> None:
    """Compare ``final/`` of a run with the checkpoint that the run started from.

    The names and shapes are equal. Tensors that are not trained have the dtype and the bytes of the source.
    Every tensor of the source is exported, or the model card names it.

    Raises:
        ExportError: If they differ.
    """
    from portable.registry import create_backend
    from portable.run.prepare import prepare_run
    from portable.run.rank import run_rank
    from portable.run.resolve import resolve_run

    config = _configure_run(folder, source, corpus, task)
    model = prepare_run(resolve_run(config, "cpu"), create_backend("cpu")).model
    first = next(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    config = config.replaced({"train.frozen": [f"^{re.escape(first)}$"]})
    if run_rank("cpu", config) != 0:
        raise ExportError("the run failed")
    base, final = (open_checkpoint(path).tensors for path in (source, folder / "final"))
    card = (folder / "final" / "README.md").read_text("utf-8")
    lacking = [name for name in base if name not in final and f"`{name}`" not in card]
    if lacking or (more := sorted(final.keys() - base.keys())):
        raise ExportError(
            f"{len(lacking)} tensors of the source are missing: {lacking[0]}"
            if lacking
            else f"final has {len(more)} other tensors: {more[0]}"
        )
    for name in final:
        if final[name].shape != base[name].shape:
            raise ExportError(f"{name} is {list(final[name].shape)}, not {list(base[name].shape)}")
    for name in _find_untouched(config, source):
        if final[name].dtype != base[name].dtype:
            raise ExportError(f"{name} is {final[name].dtype}, not {base[name].dtype}")
        if final[name].read().tobytes() != base[name].read().tobytes():
            raise ExportError(f"{name} has other bytes")


def _find_untouched(config: RunConfig, source: Path) -> list[str]:
    """Return the published names of the tensors of a source that a run does not train."""
    from portable.private import transformers_internals
    from portable.registry import create_backend
    from portable.run.prepare import prepare_run
    from portable.run.resolve import resolve_run

    run = prepare_run(resolve_run(config, "cpu"), create_backend("cpu"))
    trained = {
        name
        for name, parameter in run.model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    trained |= _find_statistics(source)
    base = open_checkpoint(source).tensors
    names, _ = transformers_internals.map_checkpoint_names(run.model, base)
    is_trained: dict[str, bool] = {}
    for published, live, _ in names:
        is_trained[published] = is_trained.get(published, False) or live in trained
    return [name for name in base if not is_trained.get(name, name != NOT_LOADED)]


def _find_statistics(source: Path) -> set[str]:
    """Return the names of the buffers that the published class itself changes in training mode."""
    model = _load_published(source).train()
    saved = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if name in saved}
    if before:
        _compute_logits(model)
    return {name for name in before if not torch.equal(model.get_buffer(name), before[name])}


def _compute_logits(model: Any) -> torch.Tensor:
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False  # a cache needs an attention layer, and a tiny hybrid may have none
    ids = torch.arange(5, 17).view(1, -1)
    inputs = {"input_ids": ids}
    if "ForSequenceClassification" in model.config.architectures[0]:
        ids[:, -1] = model.config.eos_token_id  # BART classifies at this token
    elif model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        return model(**inputs).logits.float()  # type: ignore[no-any-return]


def _load_published(folder: Path) -> Any:
    """Load a checkpoint with the class that its config names, without missing or unexpected weights."""
    import transformers

    name = json.loads((folder / "config.json").read_text("utf-8"))["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    amiss = {
        key: sorted(set(names) - {NOT_LOADED}) for key, names in info.items() if set(names) - {NOT_LOADED}
    }
    if amiss:
        raise ExportError(f"from_pretrained: {amiss}")
    return model.eval()


def _check_equal(logits: torch.Tensor, expected: torch.Tensor) -> None:
    difference = float((logits - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    if not difference <= TOLERANCE:
        raise ExportError(f"the logits are {difference:.1e} off")


def check_adapter(folder: Path, source: Path, corpus: Path, task: str) -> None:
    """Train an adapter, and load it with peft on the published class: the logits equal the training logits.

    Raises:
        ExportError: If they differ, or the adapter does not change them.
    """
    import peft

    from portable.run.rank import run_rank

    config = _configure_run(
        folder, source, corpus, task, adapter__type="lora", adapter__r=4, train__learning_rate=0.02
    )
    if run_rank("cpu", config) != 0:
        raise ExportError("the run failed")
    with opened(config) as trial:
        trial.engine.load_checkpoint(open_checkpoint(folder / "checkpoints" / f"step-{_STEPS:06d}"))
        ours = _compute_logits(trial.engine.model.eval())
    torch.save(ours, folder / "logits.pt")
    model = _load_published(source)
    before = _compute_logits(model)
    after = _compute_logits(peft.PeftModel.from_pretrained(model, folder / "final").eval())
    if not float((after - before).abs().max()) > 1e-4:
        raise ExportError("the adapter does not change the logits")
    _check_equal(after, ours)


def find_peft_fault(folder: Path, source: Path) -> str:
    """Save and load an adapter with only peft and transformers.

    Args:
        folder: Folder to write to.
        source: Checkpoint that the adapter is for.

    Returns:
        Description of the failure, or an empty string.
    """
    import peft

    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    try:
        adapted = peft.get_peft_model(_load_published(source), settings).eval()
        expected = _compute_logits(adapted)
        adapted.save_pretrained(str(folder))
        loaded = peft.PeftModel.from_pretrained(_load_published(source), folder).eval()
        difference = float((_compute_logits(loaded) - expected).abs().max())
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"an adapter that it saves and loads is {difference:.1e} off" if difference > TOLERANCE else ""


def check_merge(folder: Path, source: Path) -> None:
    """Merge the adapter of :func:`check_adapter`; compare it with the base and the logits of training.

    Raises:
        ExportError: If they differ.
    """
    adapter = find_adapter(open_checkpoint(folder / "final"))
    if adapter is None:
        raise ExportError("final is not an adapter")
    write_safetensors(merge(adapter, open_checkpoint(source)), folder / "merged")
    base, merged = (open_checkpoint(path).tensors for path in (source, folder / "merged"))
    if base.keys() != merged.keys():
        raise ExportError(f"the names differ: {min(base.keys() ^ merged.keys())}")
    for name in base:
        if (base[name].shape, base[name].dtype) != (merged[name].shape, merged[name].dtype):
            raise ExportError(f"{name} has another shape or dtype")
    _check_equal(_compute_logits(_load_published(folder / "merged")), torch.load(folder / "logits.pt"))
