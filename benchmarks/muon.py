"""What Muon costs: processor time and traffic of an update by strategy, beside AdamW and torch's own Muon.

``python -m benchmarks.muon`` takes a few steps of one model on local CPU ranks with each optimizer. Times are
those of a rank's processor in ``Engine.update``, where other work on the machine does not count. Bytes are
what a rank sends to others in the collectives within it. With ``xla``, ranks are virtual devices of one
process, whose time is divided by their number, and bytes are those of the update compiled for a TPU v5e.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
import torch.distributed as dist

from benchmarks.big_state import on_ranks, step
from benchmarks.machine import command_line, describe_machine, machine_in_words
from portable.config import RunConfig, load_config
from portable.errors import UserError
from portable.registry import CompileTarget, backend_package, create_backend
from portable.run.prepare import prepare
from portable.run.restore import restore
from portable.run.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STRATEGIES = ("no_shard", "full_shard", "zero2", "xla")
OPTIMIZERS = ("adamw", "muon")
WARM_UP = 2  # steps


def config_of(folder: Path, given: argparse.Namespace, **settings: Any) -> RunConfig:
    return load_config(
        None,
        {
            "backend": "cpu",
            "precision": given.precision,
            "output_dir": str(folder / "run"),
            "model.config": {
                "model_type": "llama",
                "vocab_size": 4096,
                "hidden_size": given.hidden,
                "intermediate_size": given.hidden * 8 // 3 // 16 * 16,
                "num_hidden_layers": given.layers,
                "num_attention_heads": 8,
                "max_position_embeddings": 64,
            },
            "data.seq_len": 64,
            "data.cache_dir": str(folder / "cache"),
            "data.eval_fraction": 0,
            "data.max_samples": 40,
            "train.global_batch_size": 4,
            "train.micro_batch_size": 1,
            "train.learning_rate": 1e-3,
            "log.trackers": [],
            **settings,
        },
    )


class Sent:
    """Counts the bytes that this rank sends in collectives, from the call of :meth:`watch` on."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self.counting = False

    def watch(self) -> None:
        """Replace torch.distributed's collectives by ones that count."""
        ranks = dist.get_world_size()
        share = (ranks - 1) / ranks
        ring: dict[str, Callable[[Any, Any], float]] = {
            "all_reduce": lambda tensor, _: 2 * share * tensor.nbytes,
            "broadcast": lambda tensor, _: share * tensor.nbytes,
            "all_gather_into_tensor": lambda output, _: share * output.nbytes,
            "_all_gather_base": lambda output, _: share * output.nbytes,
            "all_gather": lambda output, _: share * sum(one.nbytes for one in output),
            "reduce_scatter_tensor": lambda _, given: share * given.nbytes,
            "all_to_all_single": lambda _, given: share * given.nbytes,
        }
        for name, size in ring.items():
            setattr(dist, name, self._counted(getattr(dist, name), size))

    def _counted(self, collective: Any, size: Callable[..., float]) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            if self.counting:
                first, second, *_ = (*given, *named.values(), None)  # DeepSpeed names them
                self.bytes += size(first, second)
            return collective(*given, **named)

        return counted


def steps_of(strategy: str, config: RunConfig, steps: int) -> dict[str, float]:
    """On one rank: median processor seconds of an update, and the bytes that it sends."""
    torch.set_num_threads(1)
    if strategy != "xla":
        config = config.replaced({"strategy": strategy})
    backend = create_backend(config.backend)
    settled = settle(config, backend.name)
    backend.start()
    sent = Sent()
    if dist.is_initialized():
        sent.watch()  # before DeepSpeed and FSDP take them
    run = prepare(settled, backend)
    engine: Any = restore(run, None).engine
    update, compiles = engine.update, config.backend == "xla"
    devices = backend.devices_per_rank if compiles else 1
    updates: list[float] = []

    def timed(*given: Any, **named: Any) -> Any:
        if compiles:
            engine.layout.execute(wait=True)
        sent.counting, began = True, time.process_time()
        result = update(*given, **named)
        if compiles:
            engine.layout.execute(wait=True)
        updates.append((time.process_time() - began) / devices)
        sent.counting = False
        return result

    engine.update = timed
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            updates.clear()
            sent.bytes = 0.0
        step(run, engine, number)
    backend.stop()
    return {"update": statistics.median(updates), "sent": sent.bytes / steps}


def sent_on_tpus(config: RunConfig, devices: int) -> dict[str, float]:
    """Bytes that each chip sends in the update, as compiled for it; nothing where no slice has so many."""
    target = CompileTarget("v5e", devices, None, large=0, only_memory=False)
    try:
        compiled = backend_package("xla").compile(config, target)
    except UserError:
        return {}
    (update,) = (graph for graph in compiled.graphs if graph.name == "update")
    return {"sent": sum(kind.bytes for kind in update.collectives.values())}


def alone(config: RunConfig, name: str, steps: int) -> float:
    """Median processor seconds of torch's own optimizers on the same parameters, in one process."""
    from transformers import AutoModelForCausalLM

    from portable.model.build import model_config
    from portable.model.groups import layer_matrices

    model = AutoModelForCausalLM.from_config(model_config(config.model))
    matrices = layer_matrices(model) if name == "muon" else set()
    both: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for key, parameter in model.named_parameters():
        both[key in matrices].append(parameter)
        parameter.grad = torch.randn_like(parameter)
    optimizers: list[Any] = [torch.optim.AdamW(both[False], lr=1e-3, fused=True)]
    if both[True]:
        optimizers.append(torch.optim.Muon(both[True], lr=1e-3, adjust_lr_fn="match_rms_adamw"))
    seconds = []
    for _ in range(WARM_UP + steps):
        began = time.process_time()
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds[WARM_UP:])


def rows(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """Where, the optimizer, ranks, and what was found."""
    for name in OPTIMIZERS:
        config = config_of(folder, given)
        yield "torch.optim alone", name, 1, {"update": alone(config, name, given.steps)}
    for strategy in given.strategies:
        for name in OPTIMIZERS:
            for ranks in given.ranks:
                # Two micro-batches a step, so that the update is a graph of its own.
                on_devices = {"backend": "xla", "train.global_batch_size": 2 * ranks}
                own = on_devices if strategy == "xla" else {}
                config = config_of(folder, given, **own, **{"train.optimizer": name})
                found = on_ranks(steps_of, strategy, config, given.steps, ranks=ranks)[0]
                if strategy == "xla":
                    found = {"update": found["update"], **sent_on_tpus(config, ranks)}
                yield strategy, name, ranks, found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(
        f"{command_line('benchmarks.muon', argv)}; {machine_in_words(describe_machine(torch.device('cpu')))}"
    )
    print("| strategy | optimizer | ranks | update, s of a rank's processor | sent in it, MB |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as temporary:
        for where, name, ranks, found in rows(given, Path(temporary)):
            sent = f"{found['sent'] / 1e6:.2f}" if "sent" in found else ""
            print(f"| {where} | {name} | {ranks} | {found['update']:.3f} | {sent} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
