"""``portable-train import``: another program's file becomes a config, or a line says what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from portable.cli import main
from portable.commands.importing import import_files
from portable.config import RunConfig, keys, load_config
from portable.config.importing.importer import PROGRAMS, read
from portable.config.yaml_text import Document, parse
from tests.published import tree

TABLE = keys.settings(RunConfig)
IMPORTS = Path(__file__).with_name("imports")
EXPECTED = parse((IMPORTS / "expected.yaml").read_text("utf-8"), "expected.yaml").value
TRL, AXOLOTL, FACTORY, ACCELERATE = (
    (IMPORTS / f"{name}.yaml").read_text("utf-8")
    for name in ("trl", "axolotl", "llama-factory", "accelerate")
)


def imported(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The settings that are printed, by dotted key, and the text."""
    import_files(words)
    text = capsys.readouterr().out
    config = load_config(parse(text, "run.yaml").value)
    return {key: keys.plain(config.get(key)) for key in TABLE if config.is_set(key)}, text


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_of_each_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = EXPECTED[name]
    found, printed = imported(str(IMPORTS / name), capsys=capsys)
    assert {key: found.get(key) for key in expected} == expected
    for line in printed.splitlines():
        if re.match(r" *[a-z_]+: .", line):
            told = rf"  # (.*{name}:\d+: |default of |micro-batch |a loss of pairs)"
            assert re.search(told, line), line


@pytest.mark.parametrize("key", ["context_parallel_size", "tensor_parallel_size"])
def test_devices_that_share_a_sequence_or_a_layer_take_one_batch(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "axolotl.yaml"
    theirs = AXOLOTL.replace("qlora", "lora").replace("paged_adamw_8bit", "adamw_torch")
    file.write_text(f"{theirs}\n{key}: 2\n")
    counts = []
    for given in (theirs, file.read_text()):
        file.write_text(given)
        assert main(["import", str(file), "--devices", "4"]) == 0
        counts.append(yaml.safe_load(capsys.readouterr().out)["train"]["global_batch_size"])
    assert counts[1] == counts[0] // 2


KEYS = yaml.safe_load((IMPORTS / "keys.yaml").read_text("utf-8"))


@pytest.mark.parametrize("row", KEYS, ids=lambda row: json.dumps(row["given"]))
def test_what_a_file_means_to_its_program(row: dict[str, Any]) -> None:
    found = read(Document(row["given"], {}), "theirs.yaml")
    assert not found.refused
    expected = row["comes_to"]
    assert {key: found.values.get(key) for key in expected} == expected
    assert found.values.keys().isdisjoint(row.get("unset", ()))
    pairs = {"data.format": "preference"} if "train.loss" in expected else {}
    load_config(None, {**pairs, **{key: value for key, value in expected.items() if value is not None}})


def test_several_files_and_a_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(ACCELERATE)
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


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.yaml"
    for text, line in (
        (FACTORY.replace("org/pairs", "identity,alpaca_en_demo"), "data.source: the files name no data"),
        (TRL.replace("model_name_or_path: org/model\n", ""), "model.name_or_path: the files name no model"),
        ("- 1\n", "not a config of torchtune, axolotl"),
        ("base_model: org/model\ndatasets: []\n", "data.source: the files name no data"),
        ("base_model: org/model\npretraining_dataset: org/data\n", "data.source: the files name no data"),
    ):
        path.write_text(text)
        assert main(["import", str(path)]) == 2
        assert line in capsys.readouterr().err


def test_a_default_of_a_program_yields_to_what_another_file_says(
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


@pytest.mark.parametrize("value", [True, 1, -1, 0, 0.5, "x", "", None, [], ["x"], {}, {"x": 1}], ids=repr)
def test_no_value_of_any_key_is_a_traceback(value: Any) -> None:
    for program in PROGRAMS:
        start = dict.fromkeys((program.sure.split() or program.some.split())[:2], None)
        for name in program.rows:
            found = read(Document({**start, **tree(name, value)}, {}), "theirs.yaml")
            assert all("\n" not in line for line in (*found.refused, *found.notes))
