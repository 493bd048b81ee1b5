"""Choice of an engine: missing requirements are reported in one line before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from portable.cli import main
from portable.errors import UserError
from portable.registry import World, load_backend_package
from tests.runs import configured, flags, tiny


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


def test_missing_flash_attention_suggests_sdpa(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "kernels", None)
    config = configured(
        tmp_path, corpus, backend="auto", precision="bf16", model__attention="flash_attention_2"
    )
    with pytest.raises(
        UserError, match=r"model\.attention: .*flash-attn or kernels, which is not installed.*use sdpa"
    ):
        load_backend_package("cuda").check_config(config, World(1))
