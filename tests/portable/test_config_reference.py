"""What is generated from the schema is up to date, and the example configs are what they claim to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from portable.config import RunConfig, keys, load_config
from portable.config.reference import ROOT, main


def test_generated_files_are_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_check_notices_a_stale_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("portable.config.reference.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "configs").mkdir()
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert main(["--wrong"]) == 2


def test_the_quickstart_file_promises_no_tracker_that_there_is_not() -> None:
    line = re.search(r"trackers: .*# also (.*)", (ROOT / "configs" / "quickstart.yaml").read_text())
    assert line is not None
    assert {"tensorboard", *line[1].split(", ")} == set(keys.settings(RunConfig)["log.trackers"].choices)


def test_the_quickstart_file_is_the_defaults() -> None:
    path = ROOT / "configs" / "quickstart.yaml"
    config = load_config(path)
    assert config == RunConfig()
    written = [key for key in keys.settings(RunConfig) if config.is_set(key)]
    left_out = set(keys.settings(RunConfig)) - set(written)
    assert all(key.startswith(("fsdp.", "xla.", "fp16.")) for key in left_out)
    # Other tools read it with YAML 1.1.
    assert yaml.safe_load(path.read_text("utf-8"))["train"]["eps"] == 1e-8
