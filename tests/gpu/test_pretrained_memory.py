"""Pretrained weights are read from the files into each rank's shard: no rank stores the model or sends it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from portable.config import RunConfig
from portable.registry import create_backend
from portable.run.prepare import prepare_run
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")

MIB = 2**20
SLACK = 40 * MIB  # a tensor that is being read, and allocations of libraries at their first use
COLLECTIVES = ("broadcast", "scatter", "broadcast_object_list", "all_gather_into_tensor")


def anonymous() -> int:
    """Return the resident bytes of this process that no file backs."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak_of(found: list[int]) -> Iterator[None]:
    """Append the largest growth of anonymous memory, sampled every few milliseconds."""
    ctypes.CDLL(None).malloc_trim(0)
    start, done = anonymous(), threading.Event()
    highest = start

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    found.append(max(highest, anonymous()) - start)


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("weights were sent from rank to rank")


def start(config: RunConfig, name: str) -> tuple[list[int], int, torch.Tensor]:
    """Return the memory growth of each rank while the engine reads its weights, and related values.

    Returns:
        Growth in bytes per measurement, bytes of the parameters, and one full parameter.
    """
    backend = create_backend("cpu")
    backend.start()
    try:
        run = prepare_run(resolve_run(config, backend.name), backend)
        grown: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            for collective in COLLECTIVES:
                patch.setattr(dist, collective, _refuse)
            with peak_of(grown):
                engine = restore_run(run, None).engine
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, grown[0])
        parameters: dict[str, Any] = dict(engine.model.named_parameters())
        size = sum(4 * p.numel() for p in parameters.values())
        return everyone, size, parameters[name].full_tensor().detach()
    finally:
        backend.stop()


@pytest.mark.slow
def test_pretrained_weights_of_rank_need_memory_of_its_shard(
    tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    # For its tokenizer.
    assert run_rank("cpu", configured(tmp_path / "tiny", corpus, train__steps=1, train__warmup_steps=0)) == 0
    beyond = []
    for layers in (3, 9):
        sizes = {"num_hidden_layers": layers, "hidden_size": 768, "intermediate_size": 2304}
        folder = tmp_path / f"model{layers}"
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY_MODEL, **sizes}))
        model.save_pretrained(folder, max_shard_size="40MB")
        del model
        config = configured(
            tmp_path / "out",
            corpus,
            model__name_or_path=str(folder),
            model__config=None,
            data__tokenizer=str(tmp_path / "tiny" / "final"),
            train__global_batch_size=4,
        )
        name = f"model.layers.{layers - 1}.mlp.down_proj.weight"
        grown, size, loaded = ranks.run(4, start, config, name)
        assert size > (60 if layers == 3 else 200) * MIB
        beyond.append(max(grown) - size // 4)
        assert max(grown) < size // 4 + SLACK, f"{[g // MIB for g in grown]} of {size // MIB} MiB"
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                if name in file.keys():  # noqa: SIM118 - not a mapping
                    assert torch.equal(loaded, file.get_tensor(name))
                    break
        else:
            pytest.fail(f"{name} is in no file")
    # Three times the model needs less than three times the memory in addition to the shard.
    assert beyond[1] < beyond[0] + SLACK / 2
