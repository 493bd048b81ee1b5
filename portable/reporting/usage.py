"""How the model of a run is used afterwards: commands for the terminal and the model card."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from converters.storage.object_store import is_url
from converters.writers.gguf_models import MODELS

if TYPE_CHECKING:
    from portable.config import RunConfig

AUTO = {
    "causal-lm": ("AutoModelForCausalLM", "text-generation"),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "sequence-classification": ("AutoModelForSequenceClassification", "text-classification"),
    "masked-lm": ("AutoModelForMaskedLM", "fill-mask"),
}
"""The class of transformers that opens the model of a task, and the hub's name of its pipeline."""
ASKED = {
    "causal-lm": "'Once upon a time'",
    "sequence-classification": "'Once upon a time'",
    "masked-lm": "'Once upon a ' + p.tokenizer.mask_token",
}
"""What to ask the pipelines that transformers has."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What ``vllm serve --max-lora-rank`` takes."""


def is_adapter(config: RunConfig) -> bool:
    """Whether the run's export is an adapter alone."""
    return config.adapter.type is not None and config.checkpoint.export not in ("merged", "like_base")


def usage(
    config: RunConfig, where: str, model_type: str, *, base: str | None = None, grown: bool = False
) -> list[tuple[str, str]]:
    """What can be done with an export, and the command for each.

    Args:
        config: of the run.
        where: the export, as a path, a URL or a name on the hub.
        model_type: transformers' name of its kind.
        base: what stands for the base model; None for its path or name.
        grown: whether the embeddings have more rows than the base's.
    """
    task, name = config.model.task, str(config.model.name_or_path)
    of_base = shlex.quote(base or name)
    folder = of_base if Path(name).is_dir() else f'"$(hf download {of_base})"'
    merge = f" --merge-into {folder}" if is_adapter(config) else ""
    run = re.sub("[^A-Za-z0-9_.-]", "-", Path(config.output_dir).name).lstrip("-") or "run"
    local = f"{run}-{'merged' if merge else 'model'}"
    gguf = f"portable-convert {shlex.quote(where)} {local}.gguf --to gguf{merge} && llama-cli -m {local}.gguf"
    peft = merge and config.adapter.type == "lora" and not (grown or is_url(where))
    peft = peft and not (config.adapter.use_dora or config.adapter.modules_to_save)
    found = []
    model, loaded = shlex.quote(where), where  # as a word of the shell, and as it is
    if (merge and not peft) or is_url(where):
        found.append(("merge" if merge else "fetch", f"portable-convert {model} {local}{merge}"))
        model = loaded = local
    loader, kind = AUTO[task]
    if task in ASKED:
        code = (
            f"from transformers import pipeline; p = pipeline('{kind}', {loaded!r}); print(p({ASKED[task]}))"
        )
    else:
        code = f"from transformers import {loader} as M; print(M.from_pretrained({loaded!r}))"
    found.append(("transformers", f"python -c {_double_quoted(code)}"))
    if task != "causal-lm":
        return found
    serve, scored = f"vllm serve {model}", f"pretrained={model}"
    if peft:
        rank = next((rank for rank in _RANKS if rank >= config.adapter.r), _RANKS[-1])
        named = shlex.quote(f"{run}={where}")
        serve = f"vllm serve {of_base} --enable-lora --max-lora-rank {rank} --lora-modules {named}"
        scored = f"pretrained={of_base},peft={model}"
    found.append(("vLLM", serve))
    if model_type in MODELS:
        found.append(("llama.cpp", gguf))
    found.append(("lm_eval", f"lm_eval run --model hf --model_args {scored} --tasks hellaswag"))
    return found


def _double_quoted(code: str) -> str:
    return '"' + code.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'
