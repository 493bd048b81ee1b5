"""The keys of the Trainer, TRL, axolotl, LLaMA-Factory and torchtune, and their words for values.

The hints for unknown keys of this program's own files come from here, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.config.importing.accelerate import ROWS as ACCELERATE
from portable.config.importing.rows import File, NoCounterpart, NoEffect, cells, nothing, table
from portable.config.origins import Origin, shown
from portable.config.types import truth
from portable.config.yaml_text import parse_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config.importing.rows import How, Rows

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


def _train_on(value: Any, file: File) -> dict[str, Any]:
    """Read TRL's two switches. The more specific one wins if both are on."""
    if truth(file.get("assistant_only_loss")) is True:
        return {"data.train_on": "assistant"}
    if truth(file.get("completion_only_loss")) is True:
        return {"data.train_on": "completion"}
    return {"data.train_on": "all"} if truth(file.get("completion_only_loss")) is False else {}


def _plugins(value: Any, file: File) -> None:
    """Read axolotl's list of plugins. Two of them only replace kernels, so they have no effect here."""
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if not nothing(name)]
    for name in names:
        if "CutCrossEntropy" in name or "Liger" in name:
            file.note(file.path, f"{name} has no effect: memory.loss_chunk_tokens saves the logits' memory")
        else:
            file.refuse(file.path, f"{shown(name)} has no counterpart: {file.row.why}")


def _read_entry(entry: Mapping[str, Any], rows: Rows, number: int, file: File) -> dict[str, Any]:
    """Read the keys of one entry of a list of datasets.

    Each key has a row, or is refused by name. A key without a counterpart does not drop the others.

    Args:
        entry: Keys of the entry.
        rows: Rows of such an entry.
        number: Number of the entry in its list, from 1, used in error messages.
        file: File of the list.

    Returns:
        Settings of the source, without ``data.``.
    """
    outer = file.origin(file.path)

    def origin(path: tuple[str, ...]) -> Origin:
        return Origin(f"{outer.text}: entry {number}: {'.'.join(path)}", outer.order)

    inner = File(file.program, dict(entry), rows, origin, file.unknown)
    inner.take()
    file.result.notes += inner.result.notes
    file.result.refused += inner.result.refused
    return {key.removeprefix("data."): value for key, value in inner.result.values.items()}


def _mixture(value: Any, file: File) -> dict[str, Any]:
    """TRL's ``dataset_mixture``, and ``dataset_mixer`` of older recipes: names with a share."""
    value = value or {}
    if value.get("test_split_size"):
        file.note(file.path, f"test_split_size has no effect: {_VALIDATION}")
    listed = value.get("datasets") or [{"id": name, "weight": share} for name, share in value.items()]
    read = []
    for number, entry in enumerate(listed, start=1):
        _read_entry(entry, MIXTURE_ENTRY, number, file)
        config = entry.get("config") or entry.get("name")
        split = _part(entry.get("split") or "train", entry.get("weight", entry.get("fraction")))
        source = entry.get("data_files") or entry.get("id") or entry.get("path")
        read.append(
            {"source": source, "config_name": None if config == "default" else config, "split": split}
        )
    return sources(read)


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
    "completion": "text",
    "pretrain": "text",
    "None": "auto",
}
"""axolotl's types of records."""


_QUESTIONS = {"alpaca_chat.load_qa": "question", "context_qa.load_v2": "question"}
"""axolotl's types of records with a question and an answer, and the field of the question."""
_MESSAGE_FIELDS = {("role", "content"): "messages", ("from", "value"): "conversations"}
_OF_PAIRS = {
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_messages": "prompt",
}


def _axolotl_sources(value: Any, file: File) -> dict[str, Any]:
    found = []
    for number, one in enumerate(value if isinstance(value, list) else filter(None, [value]), start=1):
        if not isinstance(one, dict) or not one.get("path"):
            raise NoCounterpart(f"{shown(one)} has no counterpart: name a file or hub dataset in data.source")
        kind, columns = one.get("type"), {}
        if isinstance(kind, dict):  # a custom prompter
            one = {**kind, **{key: item for key, item in one.items() if key != "type"}}
            kind = "alpaca"
        settings = _read_entry(one, AXOLOTL_ENTRY, number, file)
        chosen = settings.pop("chat_template", None)
        if chosen is not None:
            file.put(file.path, "data.chat_template", chosen)
        if file.get("rl") in _RL:
            form = "preference"
            columns = {ours: one[theirs] for theirs, ours in _OF_PAIRS.items() if one.get(theirs)}
        else:
            try:
                form, columns = _read_axolotl_format(str(kind), one)
            except NoCounterpart as reason:
                file.refuse(file.path, f"entry {number}: {reason}")
                form = None
        columns |= {ours: one[f"field_{ours}"] for ours in ("system", "tools") if one.get(f"field_{ours}")}
        columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
        found.append(
            {
                "source": one.get("data_files") or one["path"],
                "split": "train",
                **settings,
                "format": form,
                "columns": columns or None,
            }
        )
    return sources(found)


def _read_axolotl_format(kind: str, entry: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return ``data.format`` and ``data.columns`` of an entry of axolotl's datasets.

    Raises:
        NoCounterpart: if no format reads such records.
    """
    if kind in _QUESTIONS:
        return "alpaca", {"instruction": _QUESTIONS[kind], "output": "answer"}
    base = kind.partition(".")[0]
    if base == "alpaca":
        answer = entry.get("field_output") or entry.get("field_model")
        question = entry.get("field_instruction") or entry.get("field_human")
        fields = {"instruction": question, "input": entry.get("field_input"), "output": answer}
        return "alpaca", {ours: theirs for ours, theirs in fields.items() if theirs}
    if base in ("chat_template", "sharegpt"):
        mapping = entry.get("message_property_mappings") or {}
        sharegpt = base == "sharegpt"
        role = mapping.get("role") or entry.get("message_field_role") or ("from" if sharegpt else "role")
        content = mapping.get("content") or entry.get("message_field_content")
        content = content or ("value" if role == "from" else "content")
        others = {
            key: name for key, name in mapping.items() if key not in ("role", "content") and key != name
        }
        if (role, content) not in _MESSAGE_FIELDS or others:
            named = shown({"role": role, "content": content, **others})
            raise NoCounterpart(
                f"{entry['path']}: messages with the keys {named} have no counterpart: write them with role "
                "and content, or with from and value"
            )
        field = _MESSAGE_FIELDS[role, content]
        theirs = entry.get("field_messages") or ("conversations" if sharegpt else "messages")
        if field == "messages" and theirs == "conversations":
            return "messages", {}
        return ("sharegpt" if field == "conversations" else "messages"), {field: theirs}
    if kind not in _KINDS:
        reason = "records of this kind are not read; write them as messages, alpaca or text"
        raise NoCounterpart(f"{entry['path']}: type {shown(kind)} has no counterpart: {reason}")
    return _KINDS[kind], {}


def _entry_roles(value: Any, _: File) -> list[str] | None:
    """Read axolotl's ``roles_to_train``, whose names may be the names of ShareGPT."""
    if nothing(value):
        return None
    names = {"human": "user", "gpt": "assistant"}
    roles = [names.get(role, role) for role in map(str, value if isinstance(value, list) else [value])]
    roles = list(dict.fromkeys(roles))
    return None if roles == ["assistant"] else roles


def _entry_role_words(value: Any, file: File) -> None:
    """Check axolotl's mapping from roles to their names in the records. Only the usual names are read."""
    usual = {
        "user": {"human", "user"},
        "assistant": {"gpt", "assistant"},
        "system": {"system"},
        "tool": {"tool"},
    }
    others = {
        role: words
        for role, words in (value or {}).items()
        if not {*([words] if isinstance(words, str) else words)} <= usual.get(role, set())
    }
    if others:
        raise NoCounterpart(
            f"{shown(others)} has no counterpart: the roles in the records are user, assistant, system and "
            "tool, or human and gpt with from and value; rename them in the records"
        )


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


AXOLOTL_ENTRY = table(
    "Entries of axolotl's datasets",
    {
        "roles_to_train": _entry_roles,
        "roles": _entry_role_words,
        "chat_template": _template,
    },
    _taken,
)
MIXTURE_ENTRY = table("Entries of TRL's dataset_mixture", {}, _taken)
TRAINERS = {
    **table(
        "Trainer, TRL, axolotl, LLaMA-Factory",
        {
            "adam_beta1 adam_beta2": _betas,
            "lora_target lora_target_modules lora_target_parameters lora_modules_to_save": _names,
            "eval_steps": _every("train.eval_every", "train.eval_every_epochs", "eval_strategy"),
            "save_steps": _every("checkpoint.every_steps", "checkpoint.every_epochs", "save_strategy"),
            "evals_per_epoch saves_per_epoch": _per_epoch,
            "logging_steps": lambda value, _: None if nothing(value) else max(1, int(value)),
            "tf32": lambda value, file: "tf32" if truth(value) is True and not file.get("bf16") else None,
            "lr_scheduler_kwargs": _schedule_more,
            # In axolotl, 0 is as good as none; in the others, -1 is.
            "max_steps": lambda value, _: None if value in (0, -1) else value,
            "warmup_steps": _warmup,
            "val_set_size val_size": _share,
            "report_to": _trackers,
            "wandb_project": lambda value, _: (
                {"log.project": value, "log.trackers": ["wandb"]} if value else {}
            ),
            "dataset_mixer dataset_mixture": _mixture,
            "datasets pretraining_dataset": lambda value, file: (
                _axolotl_sources(value, file)
                if file.get("base_model") is not None
                else _mixture({"datasets": value}, file)
            ),
            "dataset": _lf_names,
            "rl": _rl,
            "stage": _lf_stage,
            "assistant_only_loss completion_only_loss": _train_on,
            "plugins": _plugins,
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
    "instruct_dataset": {"format": "alpaca", "columns": {"instruction": "input", "output": "output"}},
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
    style, turns = around.get("conversation_style"), around.get("conversation_column", "conversations")
    if name == "chat_dataset":
        sharegpt = style == "sharegpt"
        found |= {"format": "sharegpt" if sharegpt else "messages"}
        if turns != "conversations" and (sharegpt or turns != "messages"):
            found["columns"] = {"conversations" if sharegpt else "messages": turns}
    names = {"input": "instruction"} if name == "instruct_dataset" else {}
    columns = dict(found.get("columns") or {})
    columns |= {names.get(key, key): column for key, column in (around.get("column_map") or {}).items()}
    columns = {key: column for key, column in columns.items() if key != column}
    found["columns"] = columns or None
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
_OF_SCRIPTS = {
    *("block_size", "do_train", "train_file", "validation_file", "validation_split_percentage", "task_name"),
    *("text_column", "text_column_name", "summary_column", "max_source_length", "source_prefix"),
    *("config_overrides", "max_seq_length", "overwrite_cache", "model_type"),
}
"""Arguments of transformers' example scripts, which train on texts, and which TRL does not have."""
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
    if program == "axolotl" and found.get("hub.repo") is not None:
        pushes = True
        when = "end" if file.get("hub_strategy", "every_save") == "end" else "checkpoints"
        file.default("hub.push", when, "axolotl pushes to hub_model_id")
    for key in list(found):
        if key.startswith(("adapter.",) * (not lora) + ("hub.",) * (not pushes)):
            del found[key]
    if lora and program == "LLaMA-Factory":
        file.default("adapter.alpha", 2 * found.get("adapter.r", 8), "default of LLaMA-Factory")
    if program == "TRL" and "train.loss" not in found and not any(map(file.get, _OF_SCRIPTS)):
        file.default("data.train_on", "all", "default of TRL for conversations: no assistant_only_loss")
    if found.get("model.name_or_path") is None:
        file.default("train.min_learning_rate_ratio", 0.0, f"default of {program}")
    of_warmup = found.keys() & {"train.warmup_ratio", "train.warmup_steps"}
    for key, value in DEFAULTS[program].items():
        spared = (key.startswith("train.warmup") and of_warmup) or (key.startswith("adapter.") and not lora)
        if not spared and not (key == "train.epochs" and "train.steps" in found):
            file.default(key, value, f"default of {program}")
    for one, other in _INSTEAD.items():
        if found.get(one) is not None:
            found.pop(other, None)
    file.batch(devices)
    for programs, key, difference in cells("What will differ"):
        if program in programs.split(", ") and (not key or found.get(key)):
            file.result.differences.append(difference)
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
