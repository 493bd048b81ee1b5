"""A DCP folder with checksums: damage that DCP's own records do not show is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from converters import CheckpointError, item_checksums, open_checkpoint, write_shard_checksums
from converters.formats.dcp.checksums import CHECKSUMS
from converters.formats.dcp.metadata import TensorEntry, read_metadata
from converters.storage.folder import Folder
from tests.converters.compare import everything, refused


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs of one model: the same layout to the byte, other values."""
    for name in ("one", "other"):
        state = {"model": {"w": torch.randn(64, 3), "b": torch.randn(5)}, "step": 3}
        dcp_save(state, checkpoint_id=tmp_path / name, no_dist=True)
    return [tmp_path / "one", tmp_path / "other"]


def add_checksums(folder: Path) -> None:
    """Record the checksums of a folder, as its writer would have."""
    items: dict[str, dict[str, int]] = {}
    for entry in read_metadata(Folder(folder)).values():
        for item in entry.items.values() if isinstance(entry, TensorEntry) else (entry.item,):
            (checksum,) = item_checksums(folder, [(item.file, item.offset, item.length)])
            items.setdefault(item.file, {})[str(item.offset)] = checksum
    write_shard_checksums(folder, items)


def swap(left: Path, right: Path) -> None:
    away = left.with_name("away")
    left.rename(away)
    right.rename(left)
    away.rename(right)


@pytest.mark.parametrize("name", ["fsdp3-ours", "fsdp2-accelerate/pytorch_model_fsdp_0"])
def test_a_folder_with_checksums_reads_the_same(written: Path, tmp_path: Path, name: str) -> None:
    step = tmp_path / "step"
    shutil.copytree(written / name, step)
    good = everything(open_checkpoint(step))
    add_checksums(step)
    assert everything(open_checkpoint(step)) == good
    (step / CHECKSUMS).unlink()
    assert everything(open_checkpoint(step)) == good


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_of_another_run_is_refused(runs: list[Path], name: str) -> None:
    before = [everything(open_checkpoint(run)) for run in runs]
    (runs[1] / ".metadata").write_bytes((runs[1] / ".metadata").read_bytes().replace(b"1.0.0", b"1.0.1"))
    swap(runs[0] / name, runs[1] / name)
    if name != ".metadata":  # nothing shows it without checksums
        assert [everything(open_checkpoint(run)) for run in runs] == before[::-1]
    swap(runs[0] / name, runs[1] / name)
    for run in runs:
        add_checksums(run)
    swap(runs[0] / name, runs[1] / name)
    for run in runs:
        assert "from another save" in refused(run) and name in refused(run)


def test_damaged_checksums_are_refused(runs: list[Path]) -> None:
    (run, _) = runs
    good = everything(open_checkpoint(run))
    add_checksums(run)
    text = (run / CHECKSUMS).read_bytes()
    for at in range(len(text) - 1):
        (run / CHECKSUMS).write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        try:
            assert everything(open_checkpoint(run)) == good
        except CheckpointError as error:
            assert str(run) in str(error)
    for other in ("", "[]", "{}", '{"version": 1}', '{"version": 1, "metadata": {}, "items": {"a": 3}}'):
        (run / CHECKSUMS).write_text(other)
        refused(run)
    told = json.loads(text)
    del told["items"]["__0_0.distcp"]
    (run / CHECKSUMS).write_text(json.dumps(told))
    assert "no item" in refused(run)


def test_only_whole_shards_get_checksums(runs: list[Path], tmp_path: Path) -> None:
    os.truncate(runs[0] / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match="__0_0"):
        item_checksums(runs[0], [("__0_0.distcp", 0, 1200)])
    with pytest.raises(CheckpointError, match="__1_0"):
        item_checksums(runs[0], [("__1_0.distcp", 0, 1200)])
    with pytest.raises(CheckpointError, match="no DCP metadata"):
        add_checksums(tmp_path)
    add_checksums(runs[1])
    with pytest.raises(FileExistsError):
        add_checksums(runs[1])
