"""Files generated from the schema are up to date, and the quickstart config has the defaults."""

from __future__ import annotations

import yaml

from portable.config import RunConfig, keys, load_config
from portable.config.reference import ROOT, main
from portable.importing import reference as foreign_reference


def test_generated_reference_files_are_up_to_date() -> None:
    assert main(["--check"]) == 0
    assert foreign_reference.main(["--check"]) == 0


def test_quickstart_config_has_defaults() -> None:
    path = ROOT / "configs" / "quickstart.yaml"
    config = load_config(path)
    assert config == RunConfig()
    written = [key for key in keys.get_setting_fields(RunConfig) if config.is_set(key)]
    left_out = set(keys.get_setting_fields(RunConfig)) - set(written)
    assert all(key.startswith(("fsdp.", "xla.", "fp16.")) for key in left_out)
    # Other tools read it with YAML 1.1.
    assert yaml.safe_load(path.read_text("utf-8"))["train"]["eps"] == 1e-8
