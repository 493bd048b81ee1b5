"""The keys of the Trainer, TRL, axolotl, LLaMA-Factory and torchtune, and their words for values.

The hints for unknown keys of this program's own files come from here, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.config.importing.accelerate import ROWS as ACCELERATE
from portable.config.importing.rows import NoCounterpart, NoEffect, cells, nothing, table
from portable.config.origins import shown
from portable.config.types import truth
from portable.config.yaml_text import parse_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config.importing.rows import File, How

_VALIDATION = "set data.eval, such as {source: test.jsonl}; data.eval_fraction holds some out"
_LOSSES = "set train.loss to dpo, ipo, simpo or orpo"
WORDS: dict[str, dict[str, str]] = {}
for _key, _words, _here in cells("Words for values"):
    WORDS.setdefault(_key.strip("`"), {}).update(dict.fromkeys(re.findall("`(.+?)`", _words), _here))
"""Other trainers' words for values, by setting or section."""
WORDED = ("model.attention", "precision", "train.optimizer", "train.schedule")
"""Settings whose words are read, too. Those of others only make a better message."""


def _take(value: Any, _: File) -> Any:
    negative = isinstance(value, int | float) and not isinstance(value, bool) and value < 0
    return None if nothing(value) or negative or value == "auto" else value


def _positions(value: Any, file: File) -> dict[str, Any]:
    """Their length of a text counts its last token, which is only a label."""
    length = _take(value, file)
    parts = ("context_parallel_size", "sequence_parallel_degree", "context_parallel_dim")
    # Not where it is divided into equal parts, or is that of blocks of one long text.
    whole = file.get("stage") == "pt" or any(file.get(name, 1) != 1 for name in parts)
    counted = type(length) is int and length > 1 and not whole
    return {} if length is None else {"data.seq_len": length - 1 if counted else length}


def _taken(key: str, last: Callable[[Any], Any] = lambda value: value) -> How:
    """How the value of a setting is taken: as it is, or by the words of other trainers."""
    if key not in WORDED:
        return _take

    def take(value: Any, file: File) -> Any:
        value = last(value)
        if value == "adafactor":
            file.put(file.path, "train.adafactor_rule", "transformers")
        if nothing(value) or isinstance(truth(value), bool) or value == "auto":
            return None
        return WORDS[key].get(str(value).lower(), str(value)).split(",")[0]

    return take


def _names(value: Any, _: File) -> Any:
    names = [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value or ())]
    return "all-linear" if names in (["all"], ["all-linear"]) else names or None


def _betas(value: Any, file: File) -> list[Any]:
    return [file.get("adam_beta1", 0.9), file.get("adam_beta2", 0.999)]


def _every(steps: str, epochs: str, switch: str) -> How:
    """Steps between two events, or a share of all; where a switch says that steps count."""

    def take(value: Any, file: File) -> dict[str, Any]:
        word = truth(file.get(switch, file.get("evaluation_strategy", "steps")))
        if nothing(value) or word not in ("steps", True):
            return {}
        if value >= 1:
            return {steps: int(value)}
        length = file.get("max_steps", -1)
        return (
            {steps: max(1, int(value * length))}
            if length > 0
            else {epochs: value * file.get("num_train_epochs", 3)}
        )

    return take


def _per_epoch(value: Any, _: File) -> float | None:
    return 1 / value if value else None


def _schedule_more(value: Any, file: File) -> dict[str, Any]:
    left = dict(value or {})
    ratio, lowest = left.pop("min_lr_rate", None), left.pop("min_lr", None)
    ratio = lowest / file.get("learning_rate", 5e-5) if lowest else ratio
    if left:
        raise NoCounterpart(f"{shown(left)} has no counterpart: set train.schedule_params")
    return {} if ratio is None else {"train.min_learning_rate_ratio": ratio}


def _warmup(value: Any, _: File) -> dict[str, Any]:
    return {} if value is None else {"train.warmup_ratio" if 0 < value < 1 else "train.warmup_steps": value}


def _share(value: Any, _: File) -> Any:
    if value and value >= 1:
        raise NoCounterpart(f"{shown(value)} is a number of records; set data.eval_fraction to a share of 1")
    return value or 0.0


def _trackers(value: Any, _: File) -> list[str] | None:
    names = [str(one) for one in (value if isinstance(value, list) else [value]) if not nothing(one)]
    return None if "all" in names else [name for name in names if name != "none"]


def _mixture(value: Any, file: File) -> dict[str, Any]:
    """TRL's ``dataset_mixture``, and ``dataset_mixer`` of older recipes: names with a share."""
    value = value or {}
    if value.get("test_split_size"):
        file.note(file.path, f"test_split_size has no effect: {_VALIDATION}")
    listed = value.get("datasets") or [{"id": name, "weight": share} for name, share in value.items()]
    return sources(
        [
            {
                "source": one.get("id") or one.get("path"),
                "config_name": None
                if one.get("config") == "default"
                else one.get("config") or one.get("name"),
                "split": _part(one.get("split") or "train", one.get("weight")),
            }
            for one in listed
        ]
    )


def _part(split: str, share: Any) -> str:
    return split if not isinstance(share, int | float) or share >= 1 else f"{split}[:{share * 100:g}%]"


def sources(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings for one source, or a mixture in which each is read once in an epoch."""
    found = [{key: value for key, value in one.items() if value is not None} for one in found]
    if len(found) == 1:
        return {f"data.{key}": value for key, value in found[0].items()}
    names: list[str] = []
    for one in found:
        last = str(one.get("source")).rpartition("/")[2]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-_") or "source"
        names.append(name if name not in names else f"{name}-{len(names)}")
    named = [{"name": name, **one} for name, one in zip(names, found, strict=True)]
    return {"data.sources": named} if named else {}


_RL = ("dpo", "ipo", "orpo", "simpo")
_KINDS = {
    "alpaca": "alpaca",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
    "None": "auto",
}
"""axolotl's types of records."""


def _axolotl_sources(value: Any, file: File) -> dict[str, Any]:
    found = []
    for one in value if isinstance(value, list) else filter(None, [value]):
        if not isinstance(one, dict) or not one.get("path"):
            raise NoCounterpart(f"{shown(one)} has no counterpart: name a file or hub dataset in data.source")
        kind = str(one.get("type")).partition(".")[0]
        field, role = one.get("field_messages", "messages"), one.get("message_field_role")
        kind = "sharegpt" if kind == "chat_template" and field == "conversations" and role == "from" else kind
        plain = field in ("messages", "conversations") and kind in _KINDS
        if not plain and file.get("rl") not in _RL:
            reason = "records of this kind are not read; write them as messages, alpaca or text"
            raise NoCounterpart(f"{one['path']}: type {shown(one.get('type'))} has no counterpart: {reason}")
        found.append(
            {
                "source": one.get("data_files") or one["path"],
                "config_name": one.get("name"),
                "split": str(one.get("split") or "train"),
                "format": "preference" if file.get("rl") in _RL else _KINDS[kind],
                "text_field": one.get("field") or one.get("text_column"),
            }
        )
    return sources(found)


def _loss(kind: Any, beta: Any, sft: Any = None) -> str:
    """``train.loss`` for a formula, by the names that its programs share."""
    if kind in ("orpo", "simpo"):
        return kind if beta is None or kind == "orpo" else f"{kind}(beta={beta})"
    name = "ipo" if kind == "ipo" else "dpo"
    more = "" if kind in (None, "sigmoid", name) else f", loss_type={kind!r}"
    return f"{name}(beta={0.1 if beta is None else beta}{more}{f', sft={sft}' if sft else ''})"


def _rl(value: Any, file: File) -> dict[str, Any]:
    if nothing(value):
        return {}
    if value not in _RL:
        raise NoCounterpart(f"{shown(value)} has no counterpart: {_LOSSES}")
    return {"train.loss": _loss(value, file.get("rl_beta", file.get("dpo_beta")))}


def _lf_names(value: Any, file: File) -> dict[str, Any]:
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    if file.get("dataset_dir", "ONLINE") == "ONLINE" and all("/" in name for name in names):
        return sources([{"source": name} for name in names])
    raise NoCounterpart(
        f"{shown(value)} has no counterpart: these are names of LLaMA-Factory's dataset_info.json; set "
        "data.source to their files or hub datasets"
    )


def _lf_stage(value: Any, file: File) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {"sft": {}, "pt": {"data.format": "text", "data.packing": True}}
    if value == "dpo":
        loss = _loss(file.get("pref_loss"), file.get("pref_beta", 0.1), file.get("pref_ftx"))
        kinds["dpo"] = {"train.loss": loss}
    if value not in kinds:
        raise NoCounterpart(f"{shown(value)} has no counterpart: {_LOSSES}")
    return kinds[value]


def _template(value: Any, _: File) -> str | None:
    """Programs bring templates along under names of their own, and recipes write them out."""
    if nothing(value) or value in ("chatml", "tokenizer_default"):
        return "chatml" if value == "chatml" else None
    raise NoEffect(
        "has no effect: the tokenizer's own template is used; write another into a .jinja file, and name "
        "it in data.chat_template"
    )


TRAINERS = {
    **table(
        "Trainer, TRL, axolotl, LLaMA-Factory",
        {
            "adam_beta1 adam_beta2": _betas,
            "lora_target lora_target_modules lora_target_parameters lora_modules_to_save": _names,
            "eval_steps": _every("train.eval_every", "train.eval_every_epochs", "eval_strategy"),
            "save_steps": _every("checkpoint.every_steps", "checkpoint.every_epochs", "save_strategy"),
            "evals_per_epoch saves_per_epoch": _per_epoch,
            "logging_steps": lambda value, _: max(1, int(value)),
            "tf32": lambda value, file: "tf32" if truth(value) is True and not file.get("bf16") else None,
            "lr_scheduler_kwargs": _schedule_more,
            "warmup_steps": _warmup,
            "val_set_size val_size": _share,
            "report_to": _trackers,
            "wandb_project": lambda value, _: (
                {"log.project": value, "log.trackers": ["wandb"]} if value else {}
            ),
            "dataset_mixer dataset_mixture": _mixture,
            "datasets pretraining_dataset": _axolotl_sources,
            "dataset": _lf_names,
            "rl": _rl,
            "stage": _lf_stage,
            "cutoff_len max_length sequence_len": _positions,
            "chat_template template": _template,
            "push_to_hub": lambda _, file: (
                "end" if file.get("hub_strategy", "every_save") == "end" else "checkpoints"
            ),
        },
        _taken,
    ),
    # The Trainer's section has the names with and without fsdp_.
    **{
        name.replace(".fsdp_", start): row
        for name, row in ACCELERATE.items()
        if name.startswith("fsdp_config.")
        for start in (".fsdp_", ".")
    },
    "fsdp_config.reshard_after_forward": ACCELERATE["xla_fsdp_settings.reshard_after_forward"],
}


_TUNE_DATA: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"source": "tatsu-lab/alpaca", "format": "alpaca"},
    "alpaca_cleaned_dataset": {"source": "yahma/alpaca-cleaned", "format": "alpaca"},
    "slimorca_dataset": {"source": "Open-Orca/SlimOrca-Dedup", "format": "sharegpt"},
    "stack_exchange_paired_dataset": {"source": "lvwerra/stack-exchange-paired", "format": "preference"},
    "text_completion_dataset": {"format": "text"},
    "chat_dataset": {"format": "messages"},
    "instruct_dataset": {"format": "alpaca"},
    "preference_dataset": {"format": "preference"},
}


def _last(value: Any) -> str:
    return str(value).rpartition(".")[2]


def _tune_model(value: Any, file: File) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "lora": {},
        "dora": {"adapter.use_dora": True},
        "qlora": {"adapter.base": "nf4"},
    }
    kind, _, rest = _last(value).partition("_")
    return {"adapter.type": "lora"} | kinds[kind] if rest and kind in kinds else {}


def _tune_targets(value: Any, file: File) -> list[str]:
    names = ["o_proj" if name == "output_proj" else name for name in value or ()]
    return names + ["gate_proj", "up_proj", "down_proj"] * (file.get("model.apply_lora_to_mlp") is True)


def _tune_data(value: Any, file: File) -> dict[str, Any]:
    name, around = _last(value), file.get("dataset")
    if name not in _TUNE_DATA:
        raise NoCounterpart(f"{shown(name)} has no counterpart: set data.source and data.format")
    found = {**_TUNE_DATA[name], "split": around.get("split"), "config_name": around.get("name")}
    found |= {"source": source} if (source := around.get("data_files") or around.get("source")) else {}
    found |= {"format": "sharegpt"} if around.get("conversation_style") == "sharegpt" else {}
    if found["format"] == "text":
        return sources([found | {"text_field": around.get("column")}])
    # Its datasets train on the prompt, unless they say otherwise.
    trains = around.get("train_on_input", name.startswith("alpaca"))
    return sources([found | ({"train_on": "all"} if trains else {})])


def _tune_files(value: Any, _: File) -> None:
    if "Meta" in str(value):
        raise NoCounterpart("reads Meta's own files; set model.name_or_path to a folder of transformers'")


def _tune_schedule(value: Any, _: File) -> str:
    return "cosine" if _last(value) == "get_cosine_schedule_with_warmup" else _last(value)


_TUNE_LOSSES = {"DPOLoss": "dpo", "RSOLoss": "dpo(loss_type='hinge')", "IPOLoss": "ipo", "SimPOLoss": "simpo"}
TORCHTUNE = {
    **{name: row for name, row in TRAINERS.items() if name.endswith("*")},
    **table(
        "torchtune",
        {
            "tokenizer.max_seq_len": _positions,
            "checkpointer._component_": _tune_files,
            "model._component_": _tune_model,
            "model.lora_attn_modules": _tune_targets,
            "dataset._component_": _tune_data,
            "optimizer._component_": _taken("train.optimizer", lambda value: _last(value).lower()),
            "lr_scheduler._component_": _tune_schedule,
            "loss._component_": lambda value, _: _TUNE_LOSSES.get(_last(value)),
            "compile": lambda value, _: bool(value),
            "fsdp_sharding_strategy": lambda value, _: str(value).lower(),
            "metric_logger._component_": lambda value, _: (
                {"log.trackers": ["wandb"]} if "WandB" in str(value) else {}
            ),
        },
        _taken,
    ),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    program: {
        key.strip("`"): parse_value(values[column])
        for key, *values in cells("Defaults of these programs")
        if values[column]
    }
    for column, program in enumerate(("TRL", "axolotl", "LLaMA-Factory", "torchtune"))
}
"""What a program does where its file says nothing, and this one would do another thing."""
_INSTEAD = {
    "train.steps": "train.epochs",
    "train.eval_every_epochs": "train.eval_every",
    "checkpoint.every_epochs": "checkpoint.every_steps",
    "train.warmup_ratio": "train.warmup_steps",
}


def finish(file: File, devices: int) -> None:
    """What several keys say together: the batch, the loss of pairs, the defaults of the program.

    Args:
        file: whose keys were taken over.
        devices: that the batch is spread over.
    """
    found, program = file.result.values, file.program
    _preferences(file)
    lora, pushes = found.get("adapter.type") is not None, file.get("push_to_hub") is True
    for key in list(found):
        if key.startswith(("adapter.",) * (not lora) + ("hub.",) * (not pushes)):
            del found[key]
    if lora and program == "LLaMA-Factory":
        file.default("adapter.alpha", 2 * found.get("adapter.r", 8), "default of LLaMA-Factory")
    of_warmup = found.keys() & {"train.warmup_ratio", "train.warmup_steps"}
    for key, value in DEFAULTS[program].items():
        spared = (key.startswith("train.warmup") and of_warmup) or (key.startswith("adapter.") and not lora)
        if not spared and not (key == "train.epochs" and "train.steps" in found):
            settings = _positions(value, file) if key == "data.seq_len" else {key: value}
            for name, item in settings.items():
                file.default(name, item, f"default of {program}")
    for one, other in _INSTEAD.items():
        if found.get(one) is not None:
            found.pop(other, None)
    file.batch(devices)
    if found.get("data.eval_fraction") == 0:
        for key in ("train.eval_every", "train.eval_every_epochs"):
            found.pop(key, None)


def _preferences(file: File) -> None:
    """TRL's losses of pairs, whose files do not name their trainer."""
    found, of_dpo = file.result.values, ("beta", "max_prompt_length", "loss_weights")
    if file.program == "TRL" and (told_by := [name for name in of_dpo if file.get(name) is not None]):
        kinds, weights = file.get("loss_type", "sigmoid"), file.get("loss_weights")
        kinds = [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
        weights = [1] * len(kinds) if weights is None else weights
        fits = isinstance(weights, list) and len(weights) == len(kinds)
        shares = dict(zip(kinds, weights, strict=True)) if fits else {}
        sft = shares.pop("sft", file.get("rpo_alpha"))
        if [*shares.values()] == [1]:
            loss = _loss(next(iter(shares)), file.get("beta"), sft)
            file.put((told_by[0],), "train.loss", loss)
        else:
            told = "has no counterpart: one formula with the weight 1 is trained, and sft beside it"
            file.refuse(("loss_type",), f"{shown(kinds)} {told}; set train.loss to dpo")
        file.default("train.learning_rate", 1e-6, "default of TRL's DPO")
        file.note(
            (told_by[0],), "read as TRL's DPO; of another of its trainers, such as ORPO, change train.loss"
        )
    if "train.loss" in found:
        file.default("data.format", "preference", "a loss of pairs")
        found.pop("data.packing", None)
