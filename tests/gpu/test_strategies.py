"""Choice of an engine: missing requirements are reported in one line before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from portable.cli import main
from portable.errors import UserError
from portable.model.build import build_and_freeze_model, build_model_on_meta, load_model_config
from portable.registry import World, load_backend_package
from tests.runs import TINY_MODEL, configured, flags, tiny


@pytest.mark.parametrize(
    "settings", [["--strategy", "zero2"], ["--deepspeed.config.zero_optimization.stage", "2"]]
)
def test_zero_without_deepspeed_suggests_install(
    settings: list[str],
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it was not installed
    assert main([*flags(tiny(tmp_path / "out", corpus)), *settings]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install 'portable-trainer[deepspeed]'" in told
    assert not (tmp_path / "out").exists()


def test_local_rank_flag_of_deepspeed_launcher_is_accepted(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--local_rank=0", *flags(tiny(tmp_path / "out", corpus)), "--dry-run"]
    assert main(arguments) == 2
    assert "--local_rank" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("kernel", "package"),
    [
        ("flash_attention_2", "flash-attn or kernels"),
        ("flash_attention_3", "flash-attn-3 or kernels"),
        ("flash_attention_4", "flash-attn-4 or kernels"),
        ("kernels-community/flash-attn3", "kernels"),
    ],
)
def test_missing_flash_attention_suggests_sdpa(
    kernel: str, package: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions 2 and 4 have the same module, so the module is not enough."""
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flash_attn").mkdir()
    other = "flash_attn_4" if kernel == "flash_attention_2" else "flash_attn"
    install_distribution(tmp_path, other)
    config = configured(tmp_path, corpus, backend="auto", precision="bf16", model__attention=kernel)
    cuda = load_backend_package("cuda")
    with pytest.raises(
        UserError,
        match=rf"model\.attention: {kernel} .*package {package}; run: .*to sdpa",
    ):
        cuda.check_config(config, World(1))
    if package != "kernels":
        install_distribution(tmp_path, package.split()[0].replace("-", "_"))
        cuda.check_config(config, World(1))


def install_distribution(folder: Path, name: str) -> None:
    """Write the metadata of an installed distribution into a folder of ``sys.path``."""
    (folder / f"{name}-9.0.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n"
    (folder / f"{name}-9.0.dist-info" / "METADATA").write_text(metadata)


@pytest.mark.parametrize("kernel", ["flash_attention_3", "kernels-community/flash-attn3"])
def test_kernel_without_dropout_rejects_dropout(
    kernel: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portable.model.build.build_model_on_meta", build_model_with_sdpa)
    settings = {
        "backend": "auto",
        "precision": "bf16",
        "model__config": {**TINY_MODEL, "attention_dropout": 0.1},
    }
    config = configured(tmp_path, corpus, model__attention=kernel, **settings)
    model_config = load_model_config(config.model)
    with pytest.raises(
        UserError, match=rf"model\.attention: {kernel} does not support dropout.*train\.dropout to false"
    ):
        build_and_freeze_model(model_config, config)
    build_and_freeze_model(model_config, config.replaced({"train.dropout": False}))


def build_model_with_sdpa(config: Any, model_settings: Any) -> Any:
    """Build a model on the meta device without the kernel, which is not installed."""
    return build_model_on_meta(config, model_settings.model_copy(update={"attention": "sdpa"}))
