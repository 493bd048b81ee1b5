"""What is generated from the schema is up to date, and the example configs are what they claim to be."""

from __future__ import annotations

import yaml

from portable.config import RunConfig, keys, load_config
from portable.config.reference import ROOT, main
from portable.importing import reference as foreign_reference


def test_generated_files_are_up_to_date() -> None:
    assert main(["--check"]) == 0
    assert foreign_reference.main(["--check"]) == 0


def test_the_quickstart_file_is_the_defaults() -> None:
    path = ROOT / "configs" / "quickstart.yaml"
    config = load_config(path)
    assert config == RunConfig()
    written = [key for key in keys.get_setting_fields(RunConfig) if config.is_set(key)]
    left_out = set(keys.get_setting_fields(RunConfig)) - set(written)
    assert all(key.startswith(("fsdp.", "xla.", "fp16.")) for key in left_out)
    # Other tools read it with YAML 1.1.
    assert yaml.safe_load(path.read_text("utf-8"))["train"]["eps"] == 1e-8
