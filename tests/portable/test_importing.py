"""``portable-train import``: a file of another program becomes a config, or the error names the problem."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Seq2SeqTrainingArguments, training_args
from trl import DPOConfig, ModelConfig, ScriptArguments, SFTConfig  # type: ignore[attr-defined]
from trl.experimental.cpo import CPOConfig
from trl.experimental.orpo import ORPOConfig
from trl.scripts.utils import DatasetConfig

from portable.cli import main
from portable.commands.importing import print_imported_config
from portable.config import RunConfig, keys, load_config
from portable.config.origins import Origin
from portable.config.yaml_text import YamlDocument, parse_yaml
from portable.importing import axolotl, trl
from portable.importing.foreign_file import ForeignFile, ForeignProgram
from portable.importing.programs import FOREIGN_PROGRAMS, TORCHTUNE, TRL, convert_foreign_file
from tests.published import tree

TABLE = keys.get_setting_fields(RunConfig)
IMPORTS = Path(__file__).with_name("imports")
EXPECTED = parse_yaml((IMPORTS / "expected.yaml").read_text("utf-8"), "expected.yaml").value
TRL_FILE, AXOLOTL_FILE, FACTORY_FILE, ACCELERATE_FILE = (
    (IMPORTS / f"{name}.yaml").read_text("utf-8")
    for name in ("trl", "axolotl", "llama-factory", "accelerate")
)


def imported(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Return the printed settings, by dotted key, and the printed text."""
    print_imported_config(words)
    text = capsys.readouterr().out
    config = load_config(parse_yaml(text, "run.yaml").value)
    return {key: keys.to_plain_value(config.get(key)) for key in TABLE if config.is_set(key)}, text


@pytest.mark.parametrize("name", EXPECTED)
def test_import_converts_file_of_each_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = EXPECTED[name]
    found, printed = imported(str(IMPORTS / name), capsys=capsys)
    assert {key: found.get(key) for key in expected} == expected
    for line in printed.splitlines():
        if re.match(r" *[a-z_]+: .", line):
            told = rf"  # (.*{name}:\d+: |default of |micro-batch |required by a preference loss)"
            assert re.search(told, line), line


@pytest.mark.parametrize("key", ["context_parallel_size", "tensor_parallel_size"])
def test_import_divides_batch_by_parallel_devices(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "axolotl.yaml"
    theirs = AXOLOTL_FILE.replace("qlora", "lora").replace("paged_adamw_8bit", "adamw_torch")
    file.write_text(f"{theirs}\n{key}: 2\n")
    counts = []
    for given in (theirs, file.read_text()):
        file.write_text(given)
        assert main(["import", str(file), "--devices", "4"]) == 0
        counts.append(yaml.safe_load(capsys.readouterr().out)["train"]["global_batch_size"])
    assert counts[1] == counts[0] // 2


KEYS = yaml.safe_load((IMPORTS / "keys.yaml").read_text("utf-8"))


@pytest.mark.parametrize("row", KEYS, ids=lambda row: json.dumps(row["given"]))
def test_import_converts_keys_to_equivalent_settings(row: dict[str, Any]) -> None:
    found = convert_foreign_file(YamlDocument(row["given"], {}), "theirs.yaml")
    refused, noted = row.get("refused", ()), row.get("noted", found.notes)
    for texts, lines in ((refused, found.refusals), (noted, found.notes)):
        assert len(texts) == len(lines)
        assert all(text in line for text, line in zip(texts, lines, strict=True))
    expected = row["comes_to"]
    assert {key: found.values.get(key) for key in expected} == expected
    assert found.values.keys().isdisjoint(row.get("unset", ()))
    pairs = {"data.format": "preference"} if "train.loss" in expected else {}
    load_config(None, {**pairs, **{key: value for key, value in expected.items() if value is not None}})


def test_import_merges_files_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(ACCELERATE_FILE)
    script = ["train.py", "--model_name_or_path", "org/model", "--dataset-name=org/data", "--bf16", "True"]
    more = "--per_device_train_batch_size 2 --learning_rate 1e-5 --lora_target_modules a b"
    found, printed = imported(str(tmp_path / "a.yaml"), "--", *script, *more.split(), capsys=capsys)
    assert found["train.global_batch_size"] == 8  # on the four devices of Accelerate's file
    assert found["strategy"] == "shard_grad_op" and found["train.learning_rate"] == 1e-5
    assert "# command line:0: " not in printed and "# command line: learning_rate" in printed
    shares = "parallelism_config: {parallelism_config_cp_size: 2}\n"
    (tmp_path / "b.yaml").write_text(f"compute_environment: LOCAL_MACHINE\nnum_processes: 4\n{shares}")
    both = str(tmp_path / "b.yaml"), "--", *script, "--max_length", "64"
    assert imported(*both, capsys=capsys)[0]["data.seq_len"] == 64  # which two ranks divide


def test_import_error_names_missing_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.yaml"
    for text, line in (
        (
            FACTORY_FILE.replace("org/pairs", "identity,alpaca_en_demo"),
            "data.source: the files do not specify data",
        ),
        (
            TRL_FILE.replace("model_name_or_path: org/model\n", ""),
            "model.name_or_path: the files do not specify a model",
        ),
        ("- 1\n", "not a config of torchtune, axolotl"),
        ("base_model: org/model\ndatasets: []\n", "data.source: the files do not specify data"),
        (
            "base_model: org/model\npretraining_dataset: org/data\n",
            "data.source: the files do not specify data",
        ),
    ):
        path.write_text(text)
        assert main(["import", str(path)]) == 2
        assert line in capsys.readouterr().err


def test_import_prefers_explicit_values_over_program_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deepspeed = json.loads((IMPORTS / "deepspeed.json").read_text("utf-8"))
    (tmp_path / "ds.json").write_text(
        json.dumps({**deepspeed, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})
    )
    (tmp_path / "trl.yaml").write_text("model_name_or_path: org/model\ndataset_name: a\nweight_decay: 0.2\n")
    files = [str(tmp_path / name) for name in ("ds.json", "trl.yaml")]
    for names in (files, files[::-1]):
        found, _ = imported(*names, capsys=capsys)
        assert found["train.learning_rate"] == 1e-4  # and not TRL's default
        assert found["train.weight_decay"] == 0.2  # and not DeepSpeed's


SCHEMAS = json.loads((IMPORTS / "schemas.json").read_text("utf-8"))
"""Defaults and keys of programs that are not installed here, read from the sources of the named release."""
AXOLOTL_DEFAULTS, AXOLOTL_ENTRY_KEYS, FACTORY_DEFAULTS, TUNE_DATASETS, TUNE_DEFAULTS = SCHEMAS.values()
PUBLISHED = yaml.safe_load((IMPORTS / "published_keys.yaml").read_text("utf-8"))
MODEL = {"model_name_or_path": "org/model"}
ENTRY = {"path": "org/chats", "type": "chat_template"}
STARTS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "TRL": ({**MODEL, "dataset_name": "a"}, lambda: defaults_of(SFTConfig, ModelConfig, ScriptArguments)),
    "TRL with LoRA": ({**MODEL, "dataset_name": "a", "use_peft": True}, lambda: defaults_of(ModelConfig)),
    "TRL's DPO": ({**MODEL, "dataset_name": "a", "beta": 0.1}, lambda: defaults_of(DPOConfig)),
    "axolotl": ({"base_model": "a", "datasets": [ENTRY]}, lambda: AXOLOTL_DEFAULTS),
    "axolotl with LoRA": (
        {"base_model": "a", "adapter": "lora", "datasets": [ENTRY]},
        lambda: AXOLOTL_DEFAULTS,
    ),
    "LLaMA-Factory": (
        {**MODEL, "finetuning_type": "full", "cutoff_len": 2048},
        lambda: defaults_of(Seq2SeqTrainingArguments) | FACTORY_DEFAULTS,
    ),
}
TUNE_START: dict[str, Any] = {
    "checkpointer": {"checkpoint_dir": "a"},
    "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b", "lora_attn_modules": ["q_proj"]},
    "optimizer": {"_component_": "torch.optim.AdamW"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer"},
}
STARTS["torchtune with LoRA"] = (TUNE_START, lambda: TUNE_DEFAULTS)
WITHOUT_WEIGHT = ("log.", "checkpoint.every_steps", "checkpoint.every_epochs", "output_dir")
"""Settings that do not change the trained weights."""
SAME_MEANING = {"bf16": "auto"}
"""Default that means ``precision: auto``: bf16 if the device supports it."""


def defaults_of(*classes: Any) -> dict[str, Any]:
    """Return the plain defaults of dataclasses."""
    defaults: dict[str, Any] = {}
    for each in classes:
        for item in dataclasses.fields(each):
            value = item.default if item.default is not dataclasses.MISSING else None
            if item.default_factory is not dataclasses.MISSING:
                value = item.default_factory()
            if value is None or isinstance(value, str | int | float | bool | list | dict):
                defaults.setdefault(item.name, getattr(value, "value", value))
    return defaults


def with_key(values: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """Return a copy of a file with one more key. A star in the dotted path is the first entry of a list."""
    copied: dict[str, Any] = copy.deepcopy(values)
    parts = dotted.split(".")
    inside: Any = copied
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        key: Any = 0 if part == "*" else part
        if following is None:
            inside[key] = value
        elif part != "*" and not isinstance(inside.get(part), list if following == "*" else dict):
            inside[part] = [{}] if following == "*" else {}
        inside = inside[key]
    return copied


def effective(theirs: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return all settings of the run that a file describes, and the refused keys."""
    imported_run = convert_foreign_file(YamlDocument(theirs, {}), "theirs.yaml")
    pairs = {"data.format": "preference"} if "train.loss" in imported_run.values else {}
    config = load_config(None, {**pairs, **imported_run.values})
    return {key: keys.to_plain_value(config.get(key)) for key in TABLE}, imported_run.refusals


@pytest.mark.parametrize("name", STARTS)
def test_import_of_explicit_default_changes_nothing(name: str) -> None:
    """The table of defaults is complete: every field with a row in the classes of the program is checked."""
    start, defaults = STARTS[name]
    expected, _ = effective(start)
    compared = 0
    for key, value in defaults().items():
        program = TORCHTUNE if start is TUNE_START else TRL
        if key in start or program.find_key_entry(key) is None or SAME_MEANING.get(key) == value:
            continue
        compared += 1
        named = convert_foreign_file(YamlDocument(with_key(start, key, value), {}), "theirs.yaml")
        assert not named.refusals
        if named.values == convert_foreign_file(YamlDocument(start, {}), "theirs.yaml").values:
            continue
        actual, _ = effective(with_key(start, key, value))
        other = {setting: actual[setting] for setting in actual if actual[setting] != expected[setting]}
        assert not {setting for setting in other if not setting.startswith(WITHOUT_WEIGHT)}, (
            key,
            value,
            other,
        )
    assert compared > 5


@pytest.mark.parametrize(
    ("name", "config_class"), [("dpo", DPOConfig), ("simpo", CPOConfig), ("orpo", ORPOConfig)]
)
def test_import_of_axolotl_loss_has_defaults_of_trl(name: str, config_class: Any) -> None:
    defaults = defaults_of(config_class)
    start = {"base_model": "a", "rl": name}
    explicit = {**start, "rl_beta": defaults["beta"]}
    if name == "simpo":
        explicit |= {key: defaults[key] for key in ("simpo_gamma", "cpo_alpha")}
    results = [convert_foreign_file(YamlDocument(keys, {}), "theirs.yaml") for keys in (start, explicit)]
    assert results[0].values["train.loss"] == results[1].values["train.loss"]
    assert results[0].notes == results[1].notes


@pytest.mark.parametrize(
    "switches",
    [
        {"fp16": True, "tf32": True},
        {"bf16": True, "tf32": True},
        {"bf16": False, "tf32": True},
        {"fp16": True, "dtype": "bfloat16"},
        {"bf16": True, "dtype": "float32"},
        {"tf32": True},
        {"bf16": False},
        {"dtype": "float16"},
        {},
    ],
    ids=str,
)
def test_import_precision_equals_trl_in_any_order(
    switches: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args, "enable_tf32", lambda enabled: None)
    arguments = {key: value for key, value in switches.items() if key != "dtype"}
    config = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **arguments)
    expected = config.mixed_precision if config.mixed_precision != "no" else "tf32" if config.tf32 else "fp32"
    for names in (list(switches), list(switches)[::-1]):
        theirs = {**MODEL, "dataset_name": "a", **{name: switches[name] for name in names}}
        imported_run = convert_foreign_file(YamlDocument(theirs, {}), "theirs.yaml")
        assert imported_run.values.get("precision", "bf16") == expected  # the default, auto, chooses bf16


WITHOUT_EFFECT = ("profiler.", "checkpointer.checkpoint_files.", "gradient_checkpointing_kwargs.")
"""Sections of published files whose keys have no effect on a run."""


@pytest.mark.parametrize("files", [*PUBLISHED, "TRL"])
def test_import_names_misspelled_keys_at_any_depth(files: str) -> None:
    """A misspelled key at the place of each published key is named, or the section around it is."""
    program = files.split()[0].partition(":")[0]
    start = {"torchtune": TUNE_START, "axolotl": STARTS["axolotl"][0]}.get(program, STARTS["TRL"][0])
    if program == "TRL":
        published = [
            field.name for each in (SFTConfig, DPOConfig, ModelConfig) for field in dataclasses.fields(each)
        ]
        published += [f"datasets.*.{field.name}" for field in dataclasses.fields(DatasetConfig)]
    else:
        published = PUBLISHED[files].split()
    compared = 0
    for dotted in published:
        if dotted.startswith(WITHOUT_EFFECT):
            continue
        section, _, _ = dotted.rpartition(".")
        misspelled = f"{section}.misspelled".strip(".")
        imported_run = convert_foreign_file(
            YamlDocument(with_key(start, misspelled, "xyz"), {}), "theirs.yaml"
        )
        lines = [*imported_run.refusals, *imported_run.notes]
        around = section.split(".")[0]
        named = [line for line in lines if "misspelled" in line]
        if section:
            named += [
                line
                for line in lines
                if line.startswith((f"theirs.yaml: {around}", f"theirs.yaml: {section}"))
            ]
        assert named, dotted
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("program", FOREIGN_PROGRAMS, ids=lambda program: program.name)
def test_import_targets_are_settings(program: ForeignProgram) -> None:
    """A setting that a key becomes exists, and so does each setting among the defaults of the program."""
    tables = [program.keys, axolotl.ENTRY_KEYS, trl.MIXTURE_ENTRY_KEYS]
    targets = {
        target for keys_of_program in tables for key in keys_of_program.values() for target in key.targets
    }
    assert targets | program.defaults.keys() <= TABLE.keys()
    assert {difference.setting for difference in program.differences} <= {"", *TABLE}


@pytest.mark.parametrize("program", FOREIGN_PROGRAMS, ids=lambda program: program.name)
def test_import_values_have_settings_of_table(program: ForeignProgram) -> None:
    for name, key in program.keys.items():
        for value in (True, 1, 0.5, "x", "cpu", "fp32", ["x"], {"x": 1}, *key.unless):
            file = ForeignFile(program, tree(name, value), lambda path: Origin(".".join(path), 0))
            file.convert_keys()
            assert file.result.values.keys() <= {*key.targets, *UNNAMED_TARGETS}, (name, value)


UNNAMED_TARGETS = ("deepspeed.config", "train.adafactor_rule")
"""Keys that DeepSpeed reads are passed on. The word adafactor also chooses the rule of transformers."""
SILENT = {"preprocess_shards": "sizes of work, not of data"}


@pytest.mark.parametrize("key", AXOLOTL_ENTRY_KEYS)
def test_import_reads_every_key_of_axolotl_dataset(key: str) -> None:
    """Each field of an entry is read or named: a value other than the default changes the result."""
    values = {
        "path": "other",
        "type": "alpaca",
        "split": "test",
        "roles_to_train": ["user"],
        "roles": {"a": ["b"]},
    }
    values |= {
        "message_property_mappings": {"role": "from"},
        "chat_template": "chatml",
        "data_files": "x.jsonl",
    }
    start = {**ENTRY, "type": "alpaca"} if re.match("field_(in|out|hum|mod)", key) else ENTRY
    pairs = {"rl": "dpo"} if key in ("field_prompt", "field_chosen", "field_rejected") else {}
    results = []
    for entry in (start, {**start, key: values.get(key, "xyz")}):
        imported_run = convert_foreign_file(
            YamlDocument({"base_model": "a", "datasets": [entry], **pairs}, {}), "theirs.yaml"
        )
        results.append((imported_run.values, imported_run.notes, imported_run.refusals))
    assert (results[0] != results[1]) == (key not in SILENT)


@pytest.mark.parametrize("dataset", TUNE_DATASETS)
def test_import_reads_every_argument_of_torchtune_dataset(dataset: str) -> None:
    values = {
        "split": "test",
        "column_map": {"output": "x"},
        "packed": True,
        "conversation_style": "sharegpt",
    }
    values |= {"train_on_input": not dataset.startswith("alpaca"), "split_across_pack": True}
    for key in TUNE_DATASETS[dataset]:
        results = []
        for more in ({}, {key: values.get(key, "xyz")}):
            start = {
                "_component_": f"torchtune.datasets.{dataset}",
                "split": "train",
                "packed": False,
                **more,
            }
            imported_run = convert_foreign_file(
                YamlDocument({"checkpointer": {}, "dataset": start}, {}), "theirs.yaml"
            )
            results.append((imported_run.values, imported_run.notes, imported_run.refusals))
        is_supported = not any("is not supported; set data.source" in line for line in results[0][2])
        assert results[0] != results[1] or not is_supported, key


def test_import_rejects_scripts_and_reads_launchers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    for words in ([str(tmp_path / "train.py")], ["--", "torchrun", "--nproc_per_node", "2", "train.py"]):
        assert main(["import", *words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "is a Python script, whose settings cannot be read" in said
    arguments = "train.py --model_name_or_path a --dataset_name b --learning_rate 1e-5"
    for launcher in (
        "torchrun --nproc_per_node 2",
        "torchrun --nnodes=2 --nproc-per-node 1",
        "torchrun --nnodes 2:2 --nproc_per_node 1",
        "accelerate launch --num_machines 2 --num_processes=2",
        "deepspeed --num_gpus 2",
        "deepspeed --num_nodes 2 --num_gpus 1",
        "srun -n 2 python",
        "mpirun -np 2 python",
    ):
        settings, _ = imported("--", *launcher.split(), *arguments.split(), capsys=capsys)
        assert settings["train.global_batch_size"] == 16  # TRL's 8 on each of two devices
    for launcher in ("torchrun --nnodes 1:4 --nproc_per_node 2", "torchrun --nproc_per_node gpu"):
        assert main(["import", "--", *launcher.split(), *arguments.split()]) == 2
        assert "specify the number with --devices" in capsys.readouterr().err
        settings, _ = imported("--devices", "2", "--", *launcher.split(), *arguments.split(), capsys=capsys)
        assert settings["train.global_batch_size"] == 16


def test_import_of_axolotl_sets_hub_and_ignores_zero_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(
        "base_model: a\ndatasets: [{path: b, type: chat_template}]\nlearning_rate: 1e-4\nnum_epochs: 2\n"
        "max_steps: 0\nhub_model_id: me/x\nhub_private_repo: true\nhub_strategy: end\n"
    )
    values, _ = imported(str(path), capsys=capsys)
    expected = {"train.epochs": 2, "hub.repo": "me/x", "hub.private": True, "hub.push": "end"}
    assert {key: values.get(key) for key in expected} == expected
    assert "train.steps" not in values


def test_import_lists_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last block lists the differences. The exit code is 2 if a key has no counterpart."""
    chats, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    chats.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    pairs.write_text('{"prompt": "a", "completion": "b"}\n')
    words = "--", "trl", "sft", "--model_name_or_path", "a", "--dataset_name"
    for path, trains in ((chats, "all"), (pairs, None)):  # as TRL does with each
        assert main(["import", *words, str(path)]) == 0
        text = capsys.readouterr().out
        assert yaml.safe_load(text)["data"].get("train_on") == trains
        assert "# Differences from TRL:" in text.split("\n\n")[-1]
        assert ("without assistant_only_loss" in text) == (trains is not None)
    assert (
        imported(*words, str(chats), "--assistant_only_loss", capsys=capsys)[0]["data.train_on"]
        == "assistant"
    )
    (tmp_path / "nested.yaml").write_text(
        "base_model: a\ndatasets: [{path: b, type: chat_template, shards: 10}]\nlearning_rate: 1e-4\n"
    )
    assert main(["import", str(tmp_path / "nested.yaml")]) == 2
    done = capsys.readouterr()
    assert "entry 1: shards: 10 is not supported" in " ".join(done.out.replace("#", "").split())
    assert "1 unsupported key" in done.err
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE_FILE)
    assert "start the same number of ranks" in imported(str(tmp_path / "accelerate.yaml"), capsys=capsys)[1]


WITH_ADAPTER: dict[str, dict[str, Any]] = {
    "axolotl": {"adapter": "lora"},
    "LLaMA-Factory": {"finetuning_type": "lora"},
    "ms-swift": {"tuner_type": "lora"},
    "TRL": {"use_peft": True},
}
"""Keys with which the defaults of an adapter apply, some of which are computed from other keys."""


@pytest.mark.parametrize("value", [True, 1, -1, 0, 0.5, "x", "", None, [], ["x"], {}, {"x": 1}], ids=repr)
def test_import_of_any_value_has_no_traceback(value: Any) -> None:
    for program in FOREIGN_PROGRAMS:
        start: dict[str, Any] = dict.fromkeys((program.unique_keys or program.usual_keys)[:2])
        start |= WITH_ADAPTER.get(program.name, {})
        for name in program.keys:
            found = convert_foreign_file(YamlDocument({**start, **tree(name, value)}, {}), "theirs.yaml")
            assert all("\n" not in line for line in (*found.refusals, *found.notes))
