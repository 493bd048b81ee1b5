"""The search for good aio settings, on an emulated disk and on the real one."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("deepspeed")

from gpu.zero import aio, nvme
from gpu.zero import runtime as zero_runtime
from gpu.zero.aio import CHOICES, DEFAULT, Aio, Trial, search
from gpu.zero.config.document import read
from portable.config import load_config

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool
    from tests.zygote import Zygote

BEST = Aio(
    block_size=8 << 20, queue_depth=8, intra_op_parallelism=4, single_submit=True, overlap_events=False
)


def emulated(settings: Aio) -> tuple[float, float]:
    """A disk that is slower with every choice that lies further from :data:`BEST`."""
    distance = sum(
        abs(values.index(getattr(settings, name)) - values.index(getattr(BEST, name)))
        for name, values in CHOICES.items()
    )
    return 0.010 + 0.001 * distance, 0.005 + 0.002 * distance


def test_the_fastest_settings_are_found() -> None:
    trials = search(emulated, 1 << 30, seconds=0.3)
    assert trials[0].aio == BEST
    assert trials[0].rounds > 1  # measured again
    assert [trial.seconds for trial in trials] == sorted(trial.seconds for trial in trials)
    assert trials[0].write_rate == pytest.approx(100)
    assert trials[0].read_rate == pytest.approx(200)
    assert any(trial.aio == DEFAULT for trial in trials)


def test_the_time_is_kept_to() -> None:
    def slow(settings: Aio) -> tuple[float, float]:
        time.sleep(0.05)
        return emulated(settings)

    shares: list[float] = []
    start = time.monotonic()
    trials = search(slow, 1, 0.2, shares.append)
    assert time.monotonic() - start < 10
    assert 1 <= len(trials) < 10
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_what_is_to_be_pasted_is_taken(tmp_path: Path) -> None:
    yaml = aio.to_paste(BEST).split("\n\n")[1]
    path = tmp_path / "run.yaml"
    path.write_text(f"strategy: zero3\n{yaml}\n")
    document = read(load_config(path))
    assert document is not None
    assert Aio(**document.values["aio"]) == BEST


def measured(folder: Path) -> list[Trial]:
    return aio.tune(folder, seconds=1.0, size=64 << 20)


@pytest.mark.ops("async_io")
def test_the_disk_at_hand(tmp_path: Path, ranks: RankPool) -> None:
    trials = ranks.run(1, measured, tmp_path)
    assert len(trials) >= 2
    assert all(0 < trial.write_rate < 1000 and 0 < trial.read_rate < 1000 for trial in trials)
    assert not list(tmp_path.iterdir())
    printed = aio.table(trials)
    assert printed.count("the default") == 1
    assert len(printed.splitlines()) >= 3


def without_libaio(folder: Path) -> str:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    from portable.errors import UserError

    found = AsyncIOBuilder.has_function
    AsyncIOBuilder.has_function = lambda *_, **__: False
    try:
        with pytest.raises(UserError) as caught:
            aio.tune(folder, seconds=1.0, size=64 << 20)
        return str(caught.value)
    finally:
        AsyncIOBuilder.has_function = found


def test_without_libaio_there_is_one_line(tmp_path: Path, ranks: RankPool) -> None:
    """The linker is made to find no libaio."""
    told = ranks.run(1, without_libaio, tmp_path)
    assert "libaio-dev" in told
    assert not list(tmp_path.iterdir())


def with_a_lock(folder: Path) -> str:
    from torch.utils import cpp_extension

    said = folder / "said"  # a file: the trial compilation wants a descriptor
    with (
        pytest.MonkeyPatch.context() as patch,
        said.open("w", buffering=1) as file,
        contextlib.redirect_stderr(file),
    ):
        patch.setattr(cpp_extension, "_get_build_directory", lambda *_, **__: str(folder))
        nvme.check_async_io(zero_runtime.import_deepspeed("cpu"))
        assert not said.read_text()
        (folder / "lock").touch()
        nvme.check_async_io(zero_runtime.import_deepspeed("cpu"))
    return said.read_text()


@pytest.mark.ops("async_io")
def test_a_build_that_was_killed_is_told_of(tmp_path: Path, ranks: RankPool) -> None:
    told = ranks.run(1, with_a_lock, tmp_path)
    assert str(tmp_path / "lock") in told
    assert told.count("\n") == 1


def test_a_path_that_is_not_there_is_one_line(tmp_path: Path, zygote: Zygote) -> None:
    done = zygote.run("python", "-m", "gpu.zero.aio", str(tmp_path / "missing"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: PATH: {tmp_path / 'missing'} does not exist; make the folder, or name another"
    ]
