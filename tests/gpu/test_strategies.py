"""Choosing an engine: what is missing is said in one line, before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from portable.cli import main
from portable.engines.backend import TorchBackend
from portable.engines.package import CPU, TorchPackage
from portable.errors import UserError
from portable.registry import BACKENDS, World, backend_package
from portable.reporting.metrics import read_metrics
from portable.run.prepare import prepare
from portable.run.rank import run_rank
from portable.run.resolve import resolve
from portable.run.restore import restore
from tests.runs import configured, flags, tiny


@pytest.mark.parametrize(
    "settings", [["--strategy", "zero2"], ["--deepspeed.config.zero_optimization.stage", "2"]]
)
def test_without_deepspeed(
    settings: list[str],
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as an import finds it where it is not installed
    assert main([*flags(tiny(tmp_path / "out", corpus)), *settings]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install 'portable-trainer[deepspeed]'" in told
    assert not (tmp_path / "out").exists()


def test_the_flag_of_the_deepspeed_launcher_is_let_pass(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--local_rank=0", *flags(tiny(tmp_path / "out", corpus)), "--dry-run"]
    assert main(arguments) == 2
    assert "--local_rank" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(arguments) == 0


class Another(TorchPackage):
    """A device that nobody knows: the host, under a name that some code might ask for."""

    def default_precision(self, *, in_rank: bool) -> str:
        return "fp32"

    def open(self, local_rank: int, local_world_size: int) -> torch.device:
        return torch.device("cpu")

    def start(self, device: torch.device) -> None:
        pass

    def memory(self, device: torch.device) -> tuple[int, int]:
        return 1, 2


ANOTHER = Another("cuda")


def test_a_device_is_one_record(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains, saves and resumes, and goes on as the CPU does."""
    monkeypatch.setitem(BACKENDS, "cuda", (__name__, "ANOTHER"))
    for backend, folder in (("cpu", "cpu"), ("cuda", "another")):
        settings = {"backend": backend, "train__steps": 4, "checkpoint__every_steps": 2}
        for stop in (2, 4):
            config = configured(tmp_path / folder, corpus, **settings, train__stop_after=stop)
            assert run_rank(backend, config) == 0
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / folder) if "loss" in row]
        for folder in ("cpu", "another")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "high"), ("fp32", "highest")])
def test_the_precision_of_fp32_products_is_set_and_put_back(
    precision: str, expected: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag alone: what it changes is on NVIDIA GPUs, and a CPU's check, left out here, refuses tf32."""
    resolved = resolve(configured(tmp_path, corpus), "cpu")
    resolved.config.__dict__["precision"] = precision
    backend = TorchBackend(CPU)
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    try:
        restore(prepare(resolved, backend), None)
        assert torch.get_float32_matmul_precision() == expected
        assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
        backend.stop()
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(usual)


def test_flash_attention_that_is_not_installed(
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
        backend_package("cuda").check(config, World(1))
