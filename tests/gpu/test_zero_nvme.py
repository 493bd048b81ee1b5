"""ZeRO-Infinity: state that is swapped to a disk trains, is saved and resumes like state in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from portable.checks import check_config
from portable.errors import UserError
from portable.gpu.zero import nvme
from tests.gpu.test_zero_checkpoints import leg
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured, losses, weights

# DeepSpeed swaps nothing that is smaller than a megabyte. On each of two ranks three matrices a layer are
# larger: more in all than there are buffers to swap them through.
MODEL = {**TINY_MODEL, "hidden_size": 512, "intermediate_size": 1100}
SHORT: dict[str, Any] = {
    "model__config": MODEL,
    "train__steps": 3,
    "train__global_batch_size": 2,
    "data__eval_fraction": 0,
}
EVERYTHING: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "stage3_max_reuse_distance": 1e9,
        "offload_param": {"device": "nvme", "max_in_cpu": 0},
        "offload_optimizer": {"device": "nvme"},
        "stage3_param_persistence_threshold": 1000,
    }
}


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory, corpus: Path, ranks: RankPool) -> Path:
    run = tmp_path_factory.mktemp("memory") / "run"
    assert ranks.run(2, leg, run, corpus, {"strategy": "zero3", **SHORT}) == 0
    return run


@pytest.mark.parametrize("what", ["optimizer", "optimizer and parameters"])
@pytest.mark.ops("async_io")
def test_zero_nvme_trains_and_resumes(
    what: str, in_memory: Path, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    settings: dict[str, Any] = {**SHORT, "memory__nvme_path": str(tmp_path)}
    if what == "optimizer":
        settings |= {"strategy": "zero3", "memory__offload_optimizer": "nvme"}
    else:
        settings |= {"deepspeed__config": EVERYTHING}
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert ranks.run(2, leg, whole, corpus, settings) == 0
    assert losses(whole) == pytest.approx(losses(in_memory), rel=1e-5)
    assert ranks.run(2, leg, run, corpus, settings | {"train__stop_after": 1}) == 0
    swapped = list((run / "checkpoints" / "step-000001").rglob("*.swp"))
    assert len(swapped) == 2 * 3  # of two ranks: masters and two moments
    assert ranks.run(2, leg, run, corpus, settings) == 0
    assert losses(run) == losses(whole)
    assert weights(run) == weights(whole)
    assert not list(tmp_path.glob("portable-swap-*"))


def refused(folder: Path, corpus: Path, path: Path) -> str:
    config = configured(
        folder, corpus, strategy="zero3", memory__offload_optimizer="nvme", memory__nvme_path=str(path)
    )
    import deepspeed

    with pytest.raises(UserError) as caught:
        nvme.check_swapping(config, deepspeed)
        nvme.check_free_space(config, 10**18)
    return str(caught.value)


@pytest.mark.ops("async_io")
def test_zero_nvme_rejects_unusable_disk(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "does not exist" in refused(tmp_path, corpus, tmp_path / "missing")
    assert "is not a folder" in refused(tmp_path, corpus, file)
    assert "free some space" in refused(tmp_path, corpus, tmp_path)
    if nvme.find_filesystem_type(Path("/dev/shm")) == "tmpfs":
        assert "is in memory (tmpfs)" in refused(tmp_path, corpus, Path("/dev/shm"))


def test_find_filesystem_type_uses_last_mount_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mounts"
    monkeypatch.setattr(nvme, "_MOUNTS", table)
    (tmp_path / "a disk").mkdir()
    path = str(tmp_path / "a disk").replace(" ", "\\040")
    table.write_text(f"rootfs / rootfs rw 0 0\n/dev/sda / ext4 rw 0 0\ntmpfs {path} tmpfs rw 0 0\n")
    assert nvme.find_filesystem_type(tmp_path) == "ext4"
    assert nvme.find_filesystem_type(tmp_path / "a disk") == "tmpfs"
    table.write_text(table.read_text() + f"/dev/nvme0n1 {path} xfs rw 0 0\n")
    assert nvme.find_filesystem_type(tmp_path / "a disk") == "xfs"


@pytest.mark.parametrize(
    ("key", "value"), [("ema", 0.9), ("optimizer", "muon"), ("optimizer", "torch.optim:NAdam")]
)
def test_zero_nvme_rejects_unsupported_state(key: str, value: Any, tmp_path: Path, corpus: Path) -> None:
    disk = {"memory__offload_optimizer": "nvme", "memory__nvme_path": str(tmp_path)}
    with pytest.raises(UserError, match=f"train.{key}: .*does not work with offloading to nvme"):
        check_config(
            configured(tmp_path, corpus, strategy="zero3", **disk, **{f"train__{key}": value}),
            is_resolved=True,
        )
