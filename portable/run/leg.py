"""One leg of a run, from a config to a final model: the order in which things happen."""

from __future__ import annotations

import errno
import gc
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from portable.backend import Backend, Engine, backend_room
from portable.batch_plan import (
    BatchPlan,
    flops_per_token,
    parameter_count,
    plan_batches,
    total_steps,
)
from portable.checkpoint.adopt_external import Takeover, refuse_resume_step, take_over
from portable.checkpoint.external import open_foreign, own_state
from portable.checkpoint.store import TrainerState, write_durably
from portable.commands.replay import replay_step
from portable.config import difference, dump_yaml
from portable.data import IGNORED, EvalLoader, TrainLoader, build_data
from portable.data.classes import SINGLE
from portable.errors import DamagedError, RunError, ToldElsewhereError, UserError, one_line
from portable.loop import Cadence, Progress, evaluate, train
from portable.model import build as models
from portable.model.initialize import Blueprint
from portable.model.pretrained import pretrained_weights
from portable.model.shape_hints import shape_hints
from portable.model.special_tokens import (
    SpecialTokens,
    adopt_labels,
    classifies_at_end_token,
    classifies_at_the_end,
    known_classes,
    positions,
    problem_of,
)
from portable.optim.schedule import build_schedule
from portable.output.existing_run import (
    CONFIG_FILE,
    FINAL,
    check_same_run,
    checkpoints_of,
    earlier_config,
    resume_source,
)
from portable.output.export import export, recover_export
from portable.output.output_dir import open_output
from portable.paths import place_of, storage_errors
from portable.planner.meta_model import inspect
from portable.planner.this_machine import planner_here, what_fits
from portable.ranks import launch
from portable.ranks.collectives import leave_word, refuse_together, word_left
from portable.ranks.consistency import agree, settings_and_versions
from portable.ranks.watchdog import Watchdog
from portable.reporting.html_report import REPORT_FILE, write_report
from portable.reporting.loss_plot import plot_loss
from portable.reporting.metrics import METRICS_FILE, check_trackers, table
from portable.reporting.profiling import Profiler
from portable.reporting.reporter import Reporter
from portable.run.micro_batch import FIRST_GUESS, Fitting, divisors, remedies, smallest_of_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PretrainedConfig

    from portable.checkpoint.store import Checkpoints
    from portable.config import RunConfig
    from portable.data import Batch, DataSizes
    from portable.output.output_dir import Output
    from portable.paths import Place

PROMPT_TOKENS = 32
_DECIDE_ON_MEMORY = ("backend", "strategy", "precision", "compile", "model", "memory", "fsdp", "deepspeed")
EXIT_DONE, EXIT_STOPPED = 0, 75
BAR_DELAY = 1.0  # seconds that an evaluation takes before it has a bar


def train_leg(
    backend_name: str,
    config: RunConfig,
    eval_only: bool = False,
    profile: bool = False,
    replay: int | None = None,
) -> int:
    """Train from where the run stands, on the ranks of this process's launcher.

    Args:
        backend_name: cpu, cuda or xla.
        config: of the run.
        eval_only: evaluate, and train no step.
        profile: write a trace of a few steps into ``profile`` in the run's folder.
        replay: a step to take once more, as :mod:`portable.commands.replay` does, in place of training.

    Returns:
        the exit code: 0 when the schedule or ``train.stop_after`` is reached, 75 when stopped by a signal.
    """
    backend = backend_room(backend_name).create(backend_name)
    if replay is not None:
        config = config.replaced({"compile": False})  # what is compiled cannot be looked into
    output = open_output(config, backend.rank)
    prepared, refusal = None, None
    try:
        prepared = _prepared(config, backend, output, writes=not eval_only and replay is None)
    except UserError as error:
        if backend.world_size == 1:
            raise
        refusal = error
    try:
        backend.start()
        refuse_together(refusal)
        assert prepared is not None
        facts = {
            "output_dir": output.agreed,
            "the text of data.source (its fingerprint)": prepared.data.fingerprint,
        }
        agree(backend, settings_and_versions(prepared.asked) | facts)
        if prepared.config.log.memory_snapshot:
            backend.record_memory()
        prepared.settle_batches()
        if eval_only:
            return prepared.evaluate_only(output.place)
        if replay is not None:
            return replay_step(prepared, replay)
        return _train_held(prepared, output, profile=profile)
    except ToldElsewhereError:
        raise
    except (UserError, RunError) as error:
        leave_word(error)
        raise
    except Exception as error:
        launch.failing()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            leave_word(full := out_of_disk(error, output))
            raise full from error
        if isinstance(error, OSError) and (refused := not_writable(error, output)) is not None:
            leave_word(refused)
            raise refused from error
        if not backend.ran_out_of_memory(error):
            if (told := word_left()) is not None:
                raise told from None
            raise
        assert prepared is not None
        prepared.dump_memory(output)
        backend.leave()
    finally:
        output.close()
        backend.stop()
    # Only out here has the engine gone, which the error's traceback holds on to.
    raise prepared.out_of_memory(output.place)


def out_of_disk(error: OSError, output: Output) -> RunError:
    """What to tell a person whose disk is full."""
    latest = checkpoints_of(output.place).latest()
    return RunError(
        f"output_dir: {output.work} cannot be written to: {error.strerror}; free some space and run the same "
        f"command to go on; last good checkpoint: {latest or 'none'}"
    )


def not_writable(error: OSError, output: Output) -> UserError | None:
    """What to tell a person where something else stands in the place of a file; None if it is not that."""
    named = str(error.filename or "")
    if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.EACCES, errno.EPERM):
        return None
    if not named.startswith(f"{output.work}{os.sep}"):
        return None
    return UserError(f"output_dir: {named} cannot be written to: {error.strerror}; move it away")


def _prepared(config: RunConfig, backend: Backend, output: Output, *, writes: bool) -> Prepared:
    config = resolve(config, backend)
    check_same_run(output.place, config)
    check_trackers(config.log.trackers)
    if writes:
        output.check_writable()
    return Prepared(config, backend)


def _train_held(prepared: Prepared, output: Output, *, profile: bool) -> int:
    with storage_errors("output_dir"), ExitStack() as stack:
        refusal = None
        try:
            if prepared.backend.rank == 0:
                stack.enter_context(output.held())
        except UserError as error:
            refusal = error
        refuse_together(refusal)
        return prepared.train(output, profile=profile)


class Prepared:
    """Everything that a leg needs before it looks at the output folder."""

    def __init__(self, config: RunConfig, backend: Backend) -> None:
        self.asked = config  # before a micro-batch is searched for, which ranks may find differently
        self.config = config
        self.backend = backend
        self.source: Place | None = None  # the checkpoint gone on from
        self.taken: Takeover | None = None  # what it holds, where another program wrote it
        self.model_config = models.model_config(config.model)
        models.check_length(self.model_config, config)
        special_tokens = SpecialTokens(self.model_config, config.model)
        self.problem = problem_of(self.model_config, config.model)  # before the labels have a say
        self.data = build_data(
            config.data,
            task=config.model.task,
            seed=config.seed,
            decoder_start_token_id=special_tokens.decoder_start,
            label_shift=special_tokens.label_shift,
            known_classes=known_classes(self.model_config, config.model),
            problem=self.problem,
            pad_left=classifies_at_the_end(self.model_config),
            progress=True,  # only the rank that builds the cache shows it
            **tokenizer_hints(config, self.model_config),
        )
        adopt_labels(self.model_config, self.data.classes)
        special_tokens.prepare(self.data.tokenizer)
        self.model = models.build_model(self.model_config, config.model)
        aligned = special_tokens.align(self.model, self.data.tokenizer, self.data.target_frame)
        self.aligned = [] if config.model.name_or_path is None else aligned  # a new model has none to lose
        # Taken before a backend wraps or shards the model.
        self.architecture = type(self.model).__name__
        self.parameters = parameter_count(self.model)
        self.flops_per_token = flops_per_token(self.model, self.model_config, config.data.seq_len)
        models.check_vocabulary(self.model, self.data.vocab_size)
        self.progress: Progress | None = None  # once the engine stands
        self.snapshot: Place | None = None
        self.searched = config.train.micro_batch_size == "auto"
        if self.searched:
            self._take_micro_batch(self._micro_batch_of_run_begun() or self._largest_micro_batch())
        self.plan = self._plan()
        self.steps = total_steps(config, len(self.data.train))
        self.until = min(self.steps, config.train.stop_after or self.steps)
        self.schedule = build_schedule(config.train, self.steps)

    def surprises(self) -> list[str]:
        """What of the settings, of the model's and of the data may surprise a person."""
        lines = surprises(self.backend, self.config, self.model_config, self.aligned, self.data.sizes)
        if self.problem is None and (learnt := self.data.classes) is not None and learnt.problem != SINGLE:
            lines.append(f"note: problem_type is {learnt.problem}, as the labels and num_labels have it")
        return lines

    # -- batches -----------------------------------------------------------------------------------------

    def _plan(self) -> BatchPlan:
        backend = self.backend
        return plan_batches(
            self.config,
            world_size=backend.world_size,
            rank=backend.rank,
            devices_per_rank=backend.devices_per_rank,
            one_program=backend.one_program,
        )

    def _take_micro_batch(self, size: int) -> None:
        self.config = self.config.replaced({"train.micro_batch_size": size})

    def _micro_batch_of_run_begun(self) -> int | None:
        """What ``auto`` came to when the run was here before, as far as memory goes."""
        folder = place_of("output_dir", self.config.output_dir)
        earlier = earlier_config(folder)
        latest = checkpoints_of(folder).latest()
        if earlier is None or latest is None:
            return None
        same = all(getattr(earlier, name) == getattr(self.config, name) for name in _DECIDE_ON_MEMORY)
        same = same and TrainerState.read(latest).world_size == self.backend.world_size
        size = earlier.train.micro_batch_size
        return size if same and size != "auto" and size in self._micro_batches() else None

    def _micro_batches(self) -> list[int]:
        """The micro-batch sizes that the global batch allows, ascending."""
        devices = self.backend.world_size * self.backend.devices_per_rank
        return divisors(self.config.train.global_batch_size // devices)

    def _largest_micro_batch(self, *, below: int | None = None) -> int:
        """Find what fits this rank's device.

        Raises:
            UserError: if not one sequence does.
        """
        config, backend = self.config, self.backend
        self.config = config.replaced({"train.micro_batch_size": 1})
        plan = self._plan()  # refuses a global batch that cannot be divided
        fitting = Fitting(
            backend,
            config,
            plan,
            lambda: models.build_model(self.model_config, config.model),
            self.data.train,
        )
        sizes = [size for size in self._micro_batches() if below is None or size < below]
        # With nothing below, a guess is as good as can be; in answer to memory that has run out, it is not.
        guess = FIRST_GUESS if below is None else 0
        largest = fitting.largest(sizes, guess=guess, first=self._planned(sizes)) if sizes else None
        self.config = config
        if largest is None:
            more = ", ".join(remedies(config, backend.world_size)) or "more devices"
            raise UserError(
                "train.micro_batch_size: not even one sequence at a time fits the memory of the device; use "
                f"{more}"
            )
        return largest

    def _planned(self, sizes: list[int]) -> int:
        """The largest of ``sizes`` that fits by plan: where the search begins."""
        try:
            model = models.build_model(self.model_config, self.config.model)
            planner = planner_here(self.config, model, self.backend)
            return planner.largest_micro_batch(sizes) or FIRST_GUESS
        except UserError:  # the search itself will tell
            return FIRST_GUESS

    def _planned_instead(self) -> str | None:
        """What else would fit by plan."""
        try:
            model = models.build_model(self.model_config, self.config.model)
            return what_fits(planner_here(self.config, model, self.backend))
        except UserError:
            return None

    def settle_batches(self) -> None:
        """Agree with the other ranks on a micro-batch size that was searched for."""
        if not self.searched:
            return
        ours = self.plan.micro_batch_size
        self._take_micro_batch(smallest_of_all(self._micro_batches(), ours, self.backend))
        self.plan = self._plan()

    # -- out of memory -----------------------------------------------------------------------------------

    def dump_memory(self, output: Output) -> None:
        """Write ``log.memory_snapshot`` of this rank, if it is wanted."""
        if self.config.log.memory_snapshot:
            name = f"memory/rank{self.backend.rank}.pickle"
            (output.work / name).parent.mkdir(parents=True, exist_ok=True)
            self.backend.dump_memory(output.work / name)
            self.snapshot = output.place / name

    def out_of_memory(self, folder: Place) -> UserError:
        """What to tell a person about it, with what would fit."""
        config = self.config
        present = self.plan.micro_batch_size // self.backend.devices_per_rank
        del self.model  # the backend has put what ran out of memory into it
        gc.collect()
        try:
            fitting = f"{self._largest_micro_batch(below=present)} fits; set it to that, or"
        except Exception:  # whatever state the device is in: the settings to change can be told anyway
            fitting = "no smaller number was found to fit;"
        when = "at the start" if self.progress is None else f"in step {self.progress.step + 1}"
        more = ", ".join(remedies(config, self.backend.world_size)) or "more devices"
        told = f"train.micro_batch_size: out of memory {when} with {present} sequences at a time; {fitting}"
        told += f" use {more}"
        if (planned := self._planned_instead()) is not None:
            told += f"; by plan, this fits: {planned}"
        latest = checkpoints_of(folder).latest()
        told += f"; last good checkpoint: {latest}" if latest is not None else ""
        told += f"; memory snapshot: {self.snapshot}" if self.snapshot is not None else ""
        return UserError(told)

    # -- training ----------------------------------------------------------------------------------------

    def train(self, output: Output, *, profile: bool = False) -> int:
        config, backend, folder = self.config, self.backend, output.work
        output.open(inspect(self.model).checkpoint_bytes(config.train) // backend.world_size)
        checkpoints = output.checkpoints(keep=config.checkpoint.keep)
        check_same_run(output.place, config)  # again, now that no other run can write there
        source = resume_source(config, checkpoints)
        agree(backend, {"the checkpoint to go on from": source.name if source is not None else "none"})
        engine, progress = self.engine(source, checkpoints)
        if self.taken is not None:
            self.taken.check_length(self.until)
        self.progress = progress
        if backend.rank == 0:
            checkpoints.remove_partial()
            if isinstance(output.place, Path):
                recover_export(output.place / "final")
            write_durably(folder / CONFIG_FILE, dump_yaml(config))
            output.publish()
        profiler = Profiler(folder / "profile", backend.rank) if profile else None

        def report_hang(line: str) -> None:
            launch.report_hang(line)
            output.publish_soon(at_once=True)

        watchdog = Watchdog(
            rank=backend.rank,
            seconds=config.log.hang_timeout,
            folder=folder / "hang",
            report=report_hang,
            record=backend.dump_collectives,
        )

        def save(at: Progress) -> None:
            with watchdog.paused():
                self.save(checkpoints, engine, at)

        reporter = self.reporter(output, progress, checkpoints, save, profiler)
        for line in self.surprises():
            reporter.say(line)
        reporter.say(self.headline(progress))
        batches = watchdog.over(self.train_loader(progress.samples))
        gc.collect()
        gc.freeze()  # the model and the libraries will not become garbage: no need to look at them again
        try:
            with watchdog:
                stopped = train(
                    backend,
                    engine,
                    batches,
                    (lambda: watchdog.over(self.eval_batches())) if self.data.eval is not None else None,
                    progress=progress,
                    cadence=Cadence(
                        until=self.until,
                        log_every=config.log.every_steps,
                        eval_every=config.train.eval_every or 0,
                        save_every=config.checkpoint.every_steps or 0,
                        eval_samples=(config.train.eval_every_epochs or 0) * len(self.data.train),
                        save_samples=(config.checkpoint.every_epochs or 0) * len(self.data.train),
                    ),
                    schedule=self.schedule,
                    plan=self.plan,
                    max_grad_norm=config.train.max_grad_norm or 0.0,
                    events=reporter,
                )
            checkpoints.finish()
            backend.barrier()  # no rank leaves, and may be the last to, before the folder has its name
            if stopped:
                reporter.on_stop(progress)
                reporter.say(
                    f"stopped at step {progress.step}, checkpoint saved; run the same command to go on"
                )
                return EXIT_STOPPED
            complete = progress.step == self.steps
            reporter.on_end(progress, complete=complete)
            if complete:
                self.sample(engine, reporter)
        finally:
            batches.close()
            reporter.close()
            gc.unfreeze()
        if backend.rank == 0:
            self.finish(output, reporter, checkpoints.latest(), profiler, complete=complete)
        output.publish()
        return EXIT_DONE

    def reporter(
        self,
        output: Output,
        progress: Progress,
        checkpoints: Checkpoints[Any],
        save: Callable[[Progress], None],
        profiler: Profiler | None = None,
    ) -> Reporter:
        """What shows and records this run in ``output``."""
        config = self.config
        return Reporter(
            backend=self.backend,
            output=output,
            progress=progress,
            total_steps=self.steps,
            tokens_per_sample=config.data.seq_len,
            flops_per_token=self.flops_per_token,
            precision=config.precision,
            trackers=config.log.trackers,
            config=config.fingerprint(),
            checkpoints=checkpoints,
            save=save,
            profiler=profiler,
            leg={
                "backend": self.backend.name,
                "strategy": config.strategy,
                "world_size": self.backend.world_size,
                "devices_per_rank": self.backend.devices_per_rank,
                "device": self.backend.device.type,
                "precision": config.precision,
                "model": self.architecture,
                "parameters": self.parameters,
                "source": str(self.source) if self.source is not None else None,
            },
        )

    def engine(
        self, source: Place | None, checkpoints: Checkpoints[Any] | None = None
    ) -> tuple[Engine, Progress]:
        """The sharded model with its weights in place, and where the run stands.

        Args:
            source: the checkpoint to go on from, also another program's; None to start.
            checkpoints: the run's own, the older ones of which stand in where ``source``, one of them, is
                found damaged.
        """
        own = [folder for _, folder in reversed(checkpoints.complete())] if checkpoints is not None else []
        if source is not None and source not in own:
            self.taken = self.take_over(source)  # before anything is put into the model
        blueprint = Blueprint.of(self.model) if source is None else None
        engine = self.backend.prepare(self.model, self.config)
        if blueprint is not None:
            self.start_weights(engine, blueprint)
            return engine, Progress(0, 0)
        assert source is not None
        candidates = own[own.index(source) :] if source in own else [source]
        damaged: list[tuple[Place, DamagedError | None]] = []
        for candidate in candidates:
            progress, error = None, None
            try:
                progress = self.restore(engine, candidate)
            except DamagedError as found:
                error = found
            if not self.backend.any(error is not None):  # a rank sees only the damage in what it reads
                assert progress is not None
                self.source = candidate
                if checkpoints is not None and self.backend.rank == 0:
                    for folder, reason in damaged:
                        aside = checkpoints.set_aside(folder)
                        why = one_line(reason or "another rank could not read it")
                        print(
                            f"warning: {why}; set aside as {aside}, going on from {candidate}",
                            file=sys.stderr,
                        )
                return engine, progress
            damaged.append((candidate, error))
        raise damaged[0][1] or RunError(f"checkpoint.resume: {source} could not be read by another rank")

    def take_over(self, source: Place) -> Takeover | None:
        """What ``source`` holds for this run, if another program wrote it; all ranks call it."""
        taken, error = None, None
        given = place_of("checkpoint.resume", self.config.checkpoint.resume)
        try:
            foreign = open_foreign(source, [name for name, _ in self.model.named_parameters()])
            if foreign is not None:
                taken = take_over(foreign, self.config, self.model, self.schedule)
            elif source == given:  # else the run has come further by itself
                refuse_resume_step(self.config)
        except UserError as found:
            error = found
        if self.backend.any(error is not None):
            raise error or RunError(f"checkpoint.resume: {source} could not be read by another rank")
        if taken is not None:
            agree(self.backend, {f"where {source.name} stands": [taken.step, taken.samples]})
            if self.backend.rank == 0:
                for warning in taken.warnings:
                    print(f"warning: {warning}", file=sys.stderr)
        return taken

    def restore(self, engine: Engine, source: Place) -> Progress:
        """Fill ``engine`` from a checkpoint, and tell where the run stands there.

        Raises:
            DamagedError: if something in it is not as it was written.
            UserError: if it belongs to another run of this program.
        """
        from converters import CheckpointError, open_checkpoint

        try:
            with storage_errors("checkpoint.resume"):  # a store out of reach is no damage
                if self.taken is not None:
                    engine.load(self.taken.checkpoint)
                    return Progress(self.taken.step, self.taken.samples)
                checkpoint = open_checkpoint(source)
                state = TrainerState.read(checkpoint.root)
                if self.backend.rank == 0:  # what one rank finds, all are told
                    warning = state.check_files(checkpoint.root)
                    if warning is not None:
                        print(f"warning: {warning}", file=sys.stderr)
                if changed := difference(state.run, self.config.fingerprint()):
                    raise UserError(f"checkpoint.resume: {source} belongs to another run ({changed[0]})")
                if state.data != self.data.fingerprint:
                    raise UserError(
                        f"checkpoint.resume: {source} was trained on other text than "
                        f"{self.data.sizes.source} here; give data.source the same files, or choose another "
                        "output_dir"
                    )
                engine.load(checkpoint)
        except CheckpointError as error:
            raise DamagedError(f"checkpoint.resume: {error}") from error
        return Progress(state.step, state.samples, state.skipped_steps)

    def start_weights(self, engine: Engine, blueprint: Blueprint) -> None:
        config = self.config
        if config.model.from_scratch:
            for weights in blueprint.initial_weights(config.seed):
                engine.load_weights(weights)
            return
        pretrained = pretrained_weights(config.model, blueprint.model)
        if self.backend.rank == 0:
            for note in pretrained.notes():
                print(note, file=sys.stderr)
        if pretrained.missing:
            # A new head, for example: what the checkpoint lacks is initialised, the rest is then filled in.
            left = set(pretrained.missing)
            for weights in blueprint.initial_weights(config.seed):
                engine.load_weights({n: w for n, w in weights.items() if n in left})
                left -= weights.keys()
                if not left:
                    break
        engine.load_weights(pretrained.found)

    def save(self, checkpoints: Checkpoints[Any], engine: Engine, progress: Progress) -> None:
        config = self.config
        background = config.checkpoint.async_
        state = TrainerState(
            step=progress.step,
            samples=progress.samples,
            seed=config.seed,
            schedule={"kind": config.train.schedule, **asdict(self.schedule)},
            run=config.fingerprint(),
            backend=self.backend.name,
            strategy=config.strategy,
            world_size=self.backend.world_size,
            data=self.data.fingerprint,
            metadata={"skipped_steps": progress.skipped},
        )
        checkpoints.begin(
            self.backend,
            state,
            lambda folder: engine.save(folder, background=background),
            self.write_model_files,
        )
        if not background:
            checkpoints.finish()

    def write_model_files(self, folder: Path) -> None:
        """What ``from_pretrained`` needs besides the weights."""
        config = self.model_config
        config.architectures = [self.architecture]
        config.dtype = torch.float32  # of the weights beside it, whatever they were loaded from
        config.save_pretrained(folder)
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            try:
                generation.save_pretrained(folder)
            except ValueError:  # it contradicts itself, as it did where it came from
                generation.to_json_file(folder / "generation_config.json")
        self.data.tokenizer.save_pretrained(folder)

    def sample(self, engine: Engine, reporter: Reporter) -> None:
        """Let the trained model continue a text."""
        log = self.config.log
        prompt = self.sample_prompt()
        bound = positions(self.model_config)
        room = log.sample_tokens if bound is None else min(log.sample_tokens, bound - prompt.shape[1])
        if room <= 0 or self.config.model.task != "causal-lm":
            return
        tokens = engine.generate(prompt, max_new_tokens=room, seed=self.config.seed)
        start, rest = tokens[0, : prompt.shape[1]], tokens[0, prompt.shape[1] :]
        decode = self.data.tokenizer.decode
        reporter.say(f"\n--- prompt\n{decode(start)}\n--- the model goes on\n{decode(rest)}\n---\n")

    def sample_prompt(self) -> torch.Tensor:
        """``log.sample_prompt``, or the beginning of a held-out sample; int64 ``[1, length]``."""
        if self.config.log.sample_prompt is not None:
            ids: list[int] = self.data.tokenizer(self.config.log.sample_prompt)["input_ids"]
            return torch.tensor([ids], dtype=torch.int64)
        samples = self.data.eval if self.data.eval is not None else self.data.train
        batch = samples.batch([(0, 0)])
        valid = int((batch["labels"] != IGNORED).sum())
        return batch["input_ids"][:, : max(1, min(PROMPT_TOKENS, valid))]

    def finish(
        self,
        output: Output,
        reporter: Reporter,
        checkpoint: Place | None,
        profiler: Profiler | None,
        *,
        complete: bool,
    ) -> None:
        """Export, plot and say where things are; on the first rank only."""
        folder, place = output.work, output.place
        places = [("metrics", str(place / METRICS_FILE))]
        if checkpoint is not None:
            places.append(("checkpoint", str(checkpoint)))
        if complete and self.config.checkpoint.export and checkpoint is not None:
            export(checkpoint, place / FINAL)
            places.append(("model", str(place / FINAL)))
        try:
            if (picture := plot_loss(folder)) is not None:
                places.append(("loss curve", str(place / picture.name)))
                for told in write_report([folder], folder / REPORT_FILE):
                    reporter.say(f"warning: {told}")
                places.append(("report", str(place / REPORT_FILE)))
        except Exception as error:  # the run is complete without its pictures, whatever a person's row says
            reporter.say(f"warning: the run's pictures could not be drawn: {one_line(error)}")
        if profiler is not None:
            trace = str(place / profiler.path.relative_to(folder).as_posix())
            places.append(("profile", trace if profiler.written else "too few steps for one"))
        reporter.say(reporter.summary(places))
        if not complete:
            reporter.say(f"stopped before step {self.steps}, the last, as train.stop_after says")

    # -- evaluation --------------------------------------------------------------------------------------

    def train_loader(self, position: int) -> TrainLoader:
        return TrainLoader(
            self.data.train,
            seed=self.config.seed,
            position=position,
            global_batch_size=self.plan.global_batch_size,
            micro_batch_size=self.plan.micro_batch_size,
            rank=self.plan.rank,
            world_size=self.plan.world_size,
            num_workers=self.config.data.num_workers,
            pin_memory=self.backend.device.type != "cpu",
        )

    def eval_batches(self) -> Iterator[Batch]:
        assert self.data.eval is not None
        loader = EvalLoader(
            self.data.eval,
            batch_size=self.plan.micro_batch_size,
            rank=self.plan.rank,
            world_size=self.plan.world_size,
            pin_memory=self.backend.device.type != "cpu",
        )
        limit = self.config.train.eval_batches
        # Counted in global batches, so that every world size evaluates the same samples.
        most = len(loader) if limit is None else min(len(loader), limit * self.plan.accumulation_steps)
        yield from tqdm(
            islice(loader, most),
            total=most,
            unit="batch",
            desc="evaluating",
            leave=False,
            delay=BAR_DELAY,
            dynamic_ncols=True,
            disable=self.backend.rank != 0 or not sys.stderr.isatty(),
        )

    def evaluate_only(self, folder: Place) -> int:
        if self.data.eval is None:
            raise UserError("--eval-only: data.eval_fraction is 0, so that there is nothing to evaluate on")
        engine, progress = self.engine(resume_source(self.config, checkpoints_of(folder)))
        loss = evaluate(self.backend, engine, self.eval_batches())
        if self.backend.rank == 0:
            print(table([("step", str(progress.step)), ("evaluation loss", f"{loss:.6f}")]))
        return EXIT_DONE

    def headline(self, progress: Progress) -> str:
        start = f"resuming at step {progress.step} from {self.source}" if self.source else "starting"
        if progress.step >= self.steps:
            start += ", which was the last: there is nothing left to train"
        backend, config, plan = self.backend, self.config, self.plan
        rows = [
            ("model", f"{self.architecture}, {self.parameters:,} parameters"),
            ("data", self.data.description),
            (
                "ranks",
                f"{ranks_in_words(backend.world_size, backend.devices_per_rank)} on {backend.device.type}, "
                f"{config.strategy}, {config.precision}",
            ),
            (
                "batch",
                f"{plan.global_batch_size} sequences of {config.data.seq_len} tokens a step; on each rank "
                f"{plan.accumulation_steps} x {plan.micro_batch_size}" + (" (auto)" if self.searched else ""),
            ),
        ]
        hints = shape_hints(
            self.model_config,
            tokens=plan.micro_batch_size * config.data.seq_len,
            multiple=backend.shape_multiple(config.precision),
            precision=config.precision,
        )
        taken = (
            [] if self.taken is None else ["begun at another program's checkpoint", table(self.taken.rows)]
        )
        return "\n".join([start, table(rows), *taken, *hints])


def surprises(
    backend: Backend, config: RunConfig, model_config: PretrainedConfig, aligned: list[str], data: DataSizes
) -> list[str]:
    """The lines that tell a person, before the first step, of what may surprise them.

    Args:
        backend: of the run.
        config: of the run, resolved.
        model_config: of its model.
        aligned: the model's special tokens that the tokenizer's have replaced.
        data: how much there is.
    """
    lines = [f"note: {note}" for note in backend.notes(config)]
    if aligned:
        lines.append(f"note: the model takes over the tokenizer's special tokens: {'; '.join(aligned)}")
    if getattr(model_config, "disable_ngram_loss", None) is False:
        lines.append(
            "note: the model is trained on the next token alone, as with disable_ngram_loss; "
            "transformers adds losses of the tokens after it"
        )
    if data.warning is not None:
        lines.append(f"warning: {data.warning}")
    return lines


def tokenizer_hints(config: RunConfig, model_config: PretrainedConfig) -> dict[str, Any]:
    """What the model's settings say of the tokenizer.

    Of ``data.tokenizer: null``, what it stands for: the pretrained model's, or one of the right size.
    """
    return {
        "model_tokenizer": config.model.name_or_path,
        "trust_remote_code": config.model.trust_remote_code,
        "model_vocab_size": getattr(model_config.get_text_config(), "vocab_size", None),
        "ends_texts": config.model.task == "sequence-classification"
        and classifies_at_end_token(model_config),
    }


def resolve(config: RunConfig, backend: Backend, ranks: int = 1) -> RunConfig:
    """Replace what ``auto`` stands for on this machine, and check the config against the backend."""
    config = _as_begun(backend.adopt(config, ranks), backend.name)
    if config.precision == "auto":
        config = config.replaced({"precision": backend.resolve_precision("auto")})
    backend.check(config)
    return config


def _as_begun(config: RunConfig, backend_name: str) -> RunConfig:
    """A run that is under way keeps the precision that it began with, wherever it goes on."""
    known: dict[str, Any] = {"backend": backend_name}
    if config.precision == "auto":
        earlier = earlier_config(place_of("output_dir", config.output_dir))
        if earlier is not None:
            known["precision"] = earlier.precision
        elif config.checkpoint.resume not in ("auto", "never"):
            with storage_errors("checkpoint.resume"):
                state = own_state(place_of("checkpoint.resume", config.checkpoint.resume))
            if state is not None:
                known["precision"] = state.run["precision"]
    return config.replaced(known)


def check_output_folder(backend_name: str, config: RunConfig, ranks: int) -> RunConfig:
    """Refuse, before any rank starts, what the ranks would refuse at once; the config as they will have it.

    The device itself is left alone: a launcher that opened it would hold memory on it all through the run.
    """
    backend = backend_room(backend_name).create(backend_name)
    config = _as_begun(backend.adopt(config, ranks), backend_name)
    backend.check(config)
    check_trackers(config.log.trackers)
    output = open_output(config)
    check_same_run(output.place, config)
    output.check_writable()
    plan_for(config, backend, ranks)
    return config


def plan_for(config: RunConfig, backend: Backend, ranks: int) -> BatchPlan:
    """The plan of the first of ``ranks`` ranks that this process will start, or of those that it joined."""
    world_size = max(ranks, backend.world_size)
    if config.train.micro_batch_size == "auto":  # to be found once the ranks run; one sequence always divides
        config = config.replaced({"train.micro_batch_size": 1})
    return plan_batches(config, world_size=world_size, rank=0, devices_per_rank=backend.devices_per_rank)


def ranks_in_words(world_size: int, devices_per_rank: int) -> str:
    return str(world_size) if devices_per_rank == 1 else f"{world_size} x {devices_per_rank} devices"
