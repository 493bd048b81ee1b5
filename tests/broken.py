"""Break the product on purpose, and see that the tests notice: ``python -m tests.broken [name ...]``.

Each mutant changes one place in a copy of the project and runs the tests that are to catch it there. It
survives if they pass. The exit code is 0 only where none survived. ``test_broken.py`` holds the places to the
code, so that none is left behind when the code moves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("portable", "converters", "gpu", "tpu", "configs", "tests", "benchmarks", "docs")


class Mutant(NamedTuple):
    """A change of ``before``, which stands once in ``file``, to ``after``; and the tests that must fail."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTANTS: dict[str, Mutant] = {
    "the loss is divided by all tokens, padding among them": Mutant(
        "portable/loop.py",
        "valid = backend.total(sum(engine.objective.weight(batch) for batch in batches))",
        'valid = backend.total(sum(batch["labels"].numel() for batch in batches))',
        ("tests/test_engines.py::test_trains_as_plain_torch_does",),
    ),
    "the weight of a loss of the user's is the number of labels": Mutant(
        "portable/model/loss.py",
        'return count_valid(batch["labels"]) if self._loss is None else self._loss.weight(batch)',
        'return count_valid(batch["labels"])',
        ("tests/portable/test_own_loss.py::test_equals_a_plain_loop",),
    ),
    "the adapter of the reference stays on": Mutant(
        "portable/private/of_peft.py",
        "        layer._disable_adapters = True",
        "        layer._disable_adapters = False",
        ("tests/portable/test_preferences.py::test_the_adapter_switched_off_is_the_reference",),
    ),
    "a loss with other code is taken for the same": Mutant(
        "portable/run/own_code.py",
        "differ = [key for key, value in now.items() if before.get(key, value) != value]",
        "differ: list[str] = []",
        ("tests/portable/test_callbacks.py::test_a_run_goes_on_with_the_same_code_alone",),
    ),
    "the position in the data is one too far": Mutant(
        "portable/loop.py",
        "progress.samples += run.plan.global_batch_size",
        "progress.samples += run.plan.global_batch_size + 1",
        ("tests/portable/test_moves.py::test_goes_on_from_the_reference", "tests/portable/test_run.py"),
    ),
    "packed documents see each other": Mutant(
        "portable/model/document_attention.py",
        "return within & (documents[batch, query] == documents[batch, key])",
        "return within",
        ("tests/portable/test_document_attention.py::test_compiled_layers_are_compiled_once",),
    ),
    "packed prompts are trained": Mutant(
        "portable/data/samples/packing.py",
        "labels[row, at:end][~trained[kept][1:]] = IGNORED",
        "pass",
        ("tests/portable/test_data_packing.py::test_conversations_keep_their_masks",),
    ),
    "row groups at the end of a part are read twice": Mutant(
        "portable/data/sources/file_parts.py",
        "if self._start <= at < self._stop",
        "if self._start <= at <= self._stop + 600",
        ("tests/portable/test_data_contract.py::test_a_stream_has_each_record_once",),
    ),
    "a replaced object is not noticed": Mutant(
        "portable/data/sources/file_parts.py",
        "self._path.look_up() != self._found",
        "False",
        ("tests/portable/test_stream_faults.py::test_an_object_that_changed_since_it_was_listed",),
    ),
    "files get their name before they are on disk": Mutant(
        "portable/durable.py",
        "    descriptor = os.open(path, os.O_RDONLY)\n    try:\n        os.fsync(descriptor)",
        "    descriptor = os.open(path, os.O_RDONLY)\n    try:\n        pass",
        ("tests/portable/test_durability.py",),
    ),
    "each rank reads the first rank's shard": Mutant(
        "portable/private/of_torch.py",
        "slice(start, start + size) for start, size in zip(offset, shape, strict=True)",
        "slice(0, size) for start, size in zip(offset, shape, strict=True)",
        ("tests/portable/test_moves.py::test_goes_on_from_the_reference",),
    ),
    "a checksum that does not match passes": Mutant(
        "converters/storage/bytes.py",
        "(self._parts[0][2] if self._parts else 0) != self.crc32",
        "(self._parts[0][2] if self._parts else 0) == -1",
        ("tests/converters/test_mutations.py",),
    ),
    "the second moment is not restored": Mutant(
        "portable/engines/fsdp/optimizer_state.py",
        "            if key != AVERAGE or key in values:",
        '            if key != "exp_avg_sq":',
        ("tests/portable/test_moves.py::test_goes_on_from_the_reference",),
    ),
    "a rank makes an update that is not finite": Mutant(
        "portable/engines/fsdp/engine.py",
        "self._optimizer.found_inf = (left_out | ~finite).float().to(place)",
        "self._optimizer.found_inf = ((left_out | ~finite) & (dist.get_rank() == 0)).float().to(place)",
        ("tests/test_engines.py::test_leaves_out_an_update_that_is_not_finite",),
    ),
    "what is reduced over shards is left in parts": Mutant(
        "portable/optim/own.py",
        "        completed = [_completed(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]",
        "        completed = list(leaves)",
        ("tests/portable/test_own_optimizer.py::test_every_engine[adafactor-full_shard]",),
    ),
    "a restored optimizer of the user's keeps its first state": Mutant(
        "portable/engines/fsdp/optimizer_state.py",
        "        fill_shard(target, value)",
        '        fill_shard(target, value) if not name.startswith("seen of") else None',
        ("tests/portable/test_own_optimizer.py::test_goes_on_bit_for_bit",),
    ),
    "the average begins at zero": Mutant(
        "portable/optim/average.py",
        "begun[parameter] = parameter.detach().clone()",
        "begun[parameter] = torch.zeros_like(parameter)",
        ("tests/portable/test_average.py::test_the_average_is_that_of_a_plain_loop[full_shard]",),
    ),
    "SIGTERM is not handled": Mutant(
        "portable/ranks/stop_signals.py",
        "numbers = (signal.SIGTERM, signal.SIGINT)",
        "numbers = (signal.SIGINT,)",
        ("tests/portable/test_launch.py",),
    ),
    "a tied weight is written twice": Mutant(
        "converters/names/tied_weights.py",
        "if owner in stored and alias != owner}",
        "if owner in stored and alias == owner}",
        ("tests/converters/test_deepspeed.py", "tests/converters/test_dcp.py", "tests/portable/test_run.py"),
    ),
    "a folder of another run is gone on in": Mutant(
        "portable/output/existing_run.py",
        "if existing.config is not None and (changed := difference(existing.config, config)):",
        "if existing.config is None and (changed := difference(existing.config, config)):",
        (
            "tests/portable/test_bad_input.py",
            "tests/portable/test_run.py",
            "tests/portable/test_command_line.py",
        ),
    ),
    "rows that fill up a batch count in a metric": Mutant(
        "portable/evaluation/builtin.py",
        "valid = labels != IGNORED",
        "valid = labels == labels",
        ("tests/portable/test_metrics.py::test_one_class_per_text",),
    ),
    "the best checkpoint is deleted as an old one": Mutant(
        "portable/checkpoint/store.py",
        "            kept = best | self.in_use()",
        "            kept = self.in_use()",
        ("tests/portable/test_best_checkpoints.py::test_the_best_stay_beside_the_last",),
    ),
    "a lease is written without a condition": Mutant(
        "portable/output/lease.py",
        "replacing=self._tag if self._conditional else None",
        "replacing=None",
        ("tests/portable/test_remote_runs.py::test_of_two_that_start_at_once_one_begins",),
    ),
    "an object may have any name": Mutant(
        "converters/storage/object_store.py",
        "    if odd:",
        "    if not name:",
        ("tests/converters/test_remote.py::test_odd_names_of_objects_are_refused",),
    ),
    "a store that is away ends the run": Mutant(
        "portable/checkpoint/store.py",
        "passing = isinstance(failure, RetriesUsedUpError)",
        "passing = False",
        ("tests/portable/test_remote_runs.py::test_a_store_that_is_away_for_a_while",),
    ),
    "a resumed run forgets how long it has waited": Mutant(
        "portable/run/restore.py",
        "return Progress(state.step, state.samples, state.skipped_steps, state.standing)",
        "return Progress(state.step, state.samples, state.skipped_steps)",
        ("tests/portable/test_best_checkpoints.py::test_a_resumed_run_ends_at_the_same_step",),
    ),
    "a new best is not saved": Mutant(
        "portable/run/evaluation.py",
        "run.saving = run.saving or verdict.save or verdict.stop",
        "run.saving = run.saving or verdict.stop",
        ("tests/portable/test_best_checkpoints.py::test_the_best_stay_beside_the_last",),
    ),
    "a compiled loop counts as one pass": Mutant(
        "tpu/compile/report.py",
        "self.read(body, times * trips, around)",
        "self.read(body, times, around)",
        ("tests/tpu/test_compile.py::test_loops_count_as_often_as_they_run",),
    ),
    "the results of a compiled graph are whole on every chip": Mutant(
        "tpu/compile/libtpu.py",
        "+ field(12, varint(1))",
        "+ field(12, varint(0))",
        ("tests/tpu/test_compile.py::test_options_are_those_of_torch_xla",),
    ),
    "the state of a run is left out of the peak while a smaller graph runs": Mutant(
        "portable/planner/compiled.py",
        "return max(self.state_bytes + self.code_bytes + self.working_bytes, self.needed_bytes)",
        "return max(graph.argument_bytes + graph.code_bytes + graph.working_bytes for graph in self.graphs)",
        ("tests/tpu/test_compile.py::test_peak_and_comparison",),
    ),
}


def caught(mutant: Mutant) -> list[str]:
    """The tests that fail with ``mutant``, until the first ten."""
    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        path = copy / mutant.file
        path.write_text(path.read_text("utf-8").replace(mutant.before, mutant.after), "utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--maxfail=10", "--tb=no", *mutant.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.split()[1] for line in failed]


def main(names: list[str]) -> int:
    survived = 0
    for name in names or list(MUTANTS):
        start = time.monotonic()
        failed = caught(MUTANTS[name])
        survived += not failed
        verdict = f"caught by {failed[0]}, {len(failed)} in all" if failed else "SURVIVED"
        print(f"{name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
