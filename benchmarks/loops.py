"""Run four training loops in turns, with the same model, data order and optimizer.

A *turn* consists of some optimizer steps in one loop. At the end of a turn, the loop reads and logs
its loss once. All loops run in turns in one thread of one process, so that changes in the machine's
speed affect all of them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import sys
import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from portable.callbacks import Callback, Run
from portable.loop import StopSignals, run_training_loop
from portable.model.build import AUTO_CLASSES
from portable.model.parameter_groups import assign_parameter_groups
from portable.optim.optimizers import build_parameter_groups
from portable.output.output_dir import RunOutput
from portable.reporting.reporter import RunReporter
from portable.run.batches import build_train_loader
from portable.run.restore import restore_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.run.stages import PreparedRun


AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TRAINERS = {"adamw_8bit": "adamw_bnb_8bit", "adafactor": "adafactor"}
"""Name of each optimizer in the Trainer, keyed by ``train.optimizer``. The default is torch's fused AdamW."""


class Named(Protocol):
    """Protocol for a loop with a name, which identifies its turns and its results."""

    name: str


class Contestant(Named, Protocol):
    """Protocol for a loop that trains a model."""

    model: nn.Module


class Loop(Contestant, Protocol):
    """Protocol for a loop that the caller advances turn by turn. The Trainer does not support this."""

    def turn(self, steps: int) -> Turn:
        """Take ``steps`` optimizer steps, and return their times."""


@dataclass(frozen=True)
class Turn:
    """Duration of each optimizer step in a turn in seconds, and the last loss if the loop reports it."""

    seconds: list[float]
    loss: float | None


class StepClock:
    """Clock that measures the steps in one turn. The time between turns is not counted.

    A GPU runs asynchronously, and synchronization after each step would slow it down. On a GPU, the
    clock therefore measures the complete turn, and reports the mean for each step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float] = []

    def start(self) -> None:
        self._synchronize()
        self._marks = [time.perf_counter()]

    def tick(self) -> None:
        self._marks.append(time.perf_counter())

    def stop(self) -> list[float]:
        steps = len(self._marks) - 1
        if self._device.type != "cpu":
            self._synchronize()
            return [(time.perf_counter() - self._marks[0]) / steps] * steps
        return [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True)
class Setting:
    """Model, data and options that other libraries' loops share with this project's loop."""

    prepared: PreparedRun
    weights: dict[str, Tensor] | None
    """Initial weights of the model, on the CPU. None if they are in the folder ``model.name_or_path``."""
    batches: list[Batch]
    """Micro-batches of the run in order, on the CPU. They are sufficient for two more steps than the
    loops take.
    """

    @classmethod
    def of(cls, prepared: PreparedRun, model: nn.Module, *, steps: int) -> Setting:
        """Build the setting for ``steps`` optimizer steps, copying the current weights of ``model``."""
        weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        return cls(prepared, weights, _batches(prepared, steps))

    @classmethod
    def of_files(cls, prepared: PreparedRun, *, steps: int) -> Setting:
        """Build the setting from the files in ``model.name_or_path``, without loading a model."""
        return cls(prepared, None, _batches(prepared, steps))

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    @property
    def device(self) -> torch.device:
        return self.prepared.backend.device

    @property
    def accumulation(self) -> int:
        return self.prepared.batch_plan.accumulation_steps

    @property
    def max_norm(self) -> float:
        return self.config.train.max_grad_norm or 0.0

    def build_model(self) -> nn.Module:
        """Build the transformers model with the initial weights that all loops share.

        If the run trains an adapter, the model is wrapped by peft.
        """
        from transformers import AutoModelForCausalLM

        if self.weights is None:
            return self._from_files()
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(self.prepared.model_config),
            attn_implementation=self.config.model.attention,
            dtype=torch.float32,
        )
        model.config.use_cache = False  # type: ignore[union-attr]
        if self.prepared.adapter is None:
            model.load_state_dict(self.weights)
            return model.to(self.device)
        import peft

        wrapped: Any = peft.get_peft_model(model, self.prepared.adapter.config)
        model.load_state_dict(self.weights)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self.weights[name].dtype)
        found: nn.Module = wrapped.to(self.device)
        return found

    def _from_files(self) -> nn.Module:
        config, adapter = self.config, self.prepared.adapter
        compute = AUTOCAST[config.precision] or torch.float32
        given: dict[str, Any] = {}
        if config.adapter.base == "nf4":
            from transformers import BitsAndBytesConfig

            bits: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
            bits |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": compute}
            given["quantization_config"] = BitsAndBytesConfig(**bits)
        model: Any = auto_class(config.model.task).from_pretrained(
            config.model.name_or_path,
            attn_implementation=config.model.attention,
            dtype=torch.float32 if adapter is None and config.train.master_dtype == "fp32" else compute,
            device_map=str(self.device),
            **given,
        )
        model.config.use_cache = False
        if config.memory.activation_checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        if adapter is None:
            return cast("nn.Module", model)
        import peft

        return cast("nn.Module", peft.get_peft_model(model, adapter.config))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build bitsandbytes' AdamW for ``adamw_8bit``, otherwise torch's fused AdamW."""
        settings = self.config.train
        named = dict(model.named_parameters())
        groups = build_parameter_groups(
            named, assign_parameter_groups(model, settings), settings.learning_rate
        )
        common: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
        if settings.optimizer == "adamw_8bit":
            import bitsandbytes

            made: Any = bitsandbytes.optim
            return cast("torch.optim.Optimizer", made.AdamW8bit(groups, **common))
        return torch.optim.AdamW(groups, fused=True, **common)

    def build_torchao_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build torchao's AdamW with stochastic rounding, for weights in bf16, with bf16 or 8-bit moments."""
        from torchao import optim

        settings, named = self.config.train, dict(model.named_parameters())
        groups = build_parameter_groups(
            named, assign_parameter_groups(model, settings), settings.learning_rate
        )
        make: Any = optim.AdamW8bit if settings.optimizer == "adamw_8bit" else optim._AdamW
        common: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
        return cast("torch.optim.Optimizer", make(groups, bf16_stochastic_round=True, **common))

    def rows(self) -> Rows:
        return Rows(self.batches)


def auto_class(task: str | None) -> Any:
    """Return the transformers auto class for a value of ``model.task``. The default is ``causal-lm``."""
    import transformers

    return getattr(transformers, AUTO_CLASSES[task or "causal-lm"])


def plain_model(model: Any) -> nn.Module:
    """Return the transformers model inside ``model``, which may be wrapped by peft."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


def _batches(prepared: PreparedRun, steps: int) -> list[Batch]:
    loader = iter(build_train_loader(prepared, 0))
    # Load the batches for two more steps, because a data loader does extra work at its end, and because the
    # final loss is computed on the batch after the last step.
    batches = list(islice(loader, (steps + 2) * prepared.batch_plan.accumulation_steps))
    loader.close()
    return batches


class Rows(Dataset[dict[str, Any]]):
    """Dataset that yields the samples of the micro-batches in order, for other libraries' data loaders."""

    def __init__(self, batches: list[Batch]) -> None:
        self._columns = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


class ShiftedRows(Rows):
    """Dataset for transformers models that compute their loss.

    The labels are already shifted, and are passed as ``shift_labels`` so that the model does not shift
    them again.
    """

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {**row, "shift_labels": row["labels"]}


# -- this project ------------------------------------------------------------------------------------------


class PortableLoop:
    """Training loop of ``portable-train``, with its backend, engine, loader and reporter.

    A turn continues the run for some steps, without saving a checkpoint at the end.
    """

    name = "portable-train"

    def __init__(self, prepared: PreparedRun, folder: Path) -> None:
        # Log only the last step of a turn, as in a launch.
        config = prepared.config.replaced({"log.every_steps": 10**9})
        prepared = replace(prepared, config=config)
        restored = restore_run(prepared, None)
        self.model = restored.engine.model
        self._batches = iter(build_train_loader(prepared, 0))
        self._clock = StepClock(prepared.backend.device)
        folder.mkdir()
        with _quiet():
            output = RunOutput(folder, prepared.backend.rank)
            self._run = Run(prepared, restored, output.open_checkpoints(keep=None), folder)
            self._reporter = RunReporter(self._run, output, restored, self._batches)
        self._run.callbacks = [self._reporter, _Ticks(self._clock)]

    def turn(self, steps: int) -> Turn:
        self._run.end_step = self._run.step + steps
        with _quiet():
            self._clock.start()
            run_training_loop(self._run, self._batches, StopSignals())
            seconds = self._clock.stop()
        return Turn(seconds, self._reporter.last_loss)

    def close(self) -> None:
        self._batches.close()
        self._reporter.close()


class _Ticks(Callback):
    """Callback that marks the end of each step on a clock."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_step(self, run: Run) -> None:
        self._clock.tick()


# -- peers -------------------------------------------------------------------------------------------------


class BareLoop:
    """Hand-written training loop in plain PyTorch. All batches are prepared before the measurement."""

    def __init__(self, setting: Setting, name: str, *, with_torchao: bool = False) -> None:
        self.name = name
        self._setting = setting
        self.model = setting.build_model()
        if setting.config.compile:
            self.model.compile()
        build = setting.build_torchao_optimizer if with_torchao else setting.build_optimizer
        self._optimizer = build(self.model)
        self._batches = iter(setting.batches)
        self._clock = StepClock(setting.device)

    def turn(self, steps: int) -> Turn:
        accumulation, device = self._setting.accumulation, self._setting.device
        dtype = AUTOCAST[self._setting.config.precision]
        self._clock.start()
        for _ in range(steps):
            step_loss = torch.zeros((), device=device)
            for _ in range(accumulation):
                batch = next(self._batches)
                input_ids = batch["input_ids"].to(device, non_blocking=True)
                labels = batch["labels"].to(device, non_blocking=True)
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    loss = cross_entropy(self.model(input_ids=input_ids).logits, labels) / accumulation
                loss.backward()
                step_loss += loss.detach()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._setting.max_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._clock.tick()
        seconds = self._clock.stop()
        return Turn(seconds, step_loss.item())


class AccelerateLoop:
    """Training loop from Accelerate's guide, with ``prepare``, ``accumulate`` and ``backward``."""

    name = "Accelerate"

    def __init__(self, setting: Setting) -> None:
        from accelerate import Accelerator

        self._setting = setting
        self.model = setting.build_model()
        optimizer = setting.build_optimizer(self.model)
        loader = DataLoader(
            setting.rows(),
            batch_size=setting.prepared.batch_plan.micro_batch_size,
            pin_memory=setting.device.type == "cuda",
        )
        self._accelerator: Any = Accelerator(
            cpu=setting.device.type == "cpu",
            mixed_precision="no" if setting.config.precision == "fp32" else setting.config.precision,
            gradient_accumulation_steps=setting.accumulation,
            dynamo_backend="inductor" if setting.config.compile else None,
        )
        self._prepared, self._optimizer, loader = self._accelerator.prepare(self.model, optimizer, loader)
        self._batches: Iterator[Batch] = iter(loader)
        self._clock = StepClock(setting.device)
        self._accelerator.gradient_accumulation_steps = 1

    def turn(self, steps: int) -> Turn:
        accelerator, model, optimizer = self._accelerator, self._prepared, self._optimizer
        # All accelerators of a process share this number. Set it in each turn, because the Trainer requires
        # the value 1.
        accelerator.gradient_accumulation_steps = self._setting.accumulation
        self._clock.start()
        for _ in range(steps):
            step_loss = torch.zeros((), device=self._setting.device)
            for _ in range(self._setting.accumulation):
                batch = next(self._batches)
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"])
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), self._setting.max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                step_loss += loss.detach() / self._setting.accumulation
            self._clock.tick()
        seconds = self._clock.stop()
        accelerator.gradient_accumulation_steps = 1
        return Turn(seconds, step_loss.item())


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over all positions in a micro-batch, computed in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class TrainerLoop:
    """Training loop of the Hugging Face Trainer.

    The Trainer controls its loop, so it cannot be advanced turn by turn. Instead, a callback runs the
    other loops' turns after each turn of the Trainer.
    """

    name = "Trainer"

    def __init__(
        self,
        setting: Setting,
        folder: Path,
        *,
        logging_steps: int,
        deepspeed: dict[str, Any] | None = None,
    ) -> None:
        self._setting = setting
        self._folder = folder
        self._logging_steps = logging_steps
        self._deepspeed = deepspeed
        self.model = setting.build_model()

    def _tell_of_cpu_ranks(self) -> bool:
        """Configure Accelerate for DeepSpeed on CPU ranks. Without this, it would assume a single process.

        Returns:
            Whether Accelerate's state was configured. False without DeepSpeed, or on a GPU.
        """
        if self._deepspeed is None or self._setting.device.type != "cpu":
            return False
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
        return True

    def run(self, turns: list[int], after_turn: Callable[[int, Turn], None]) -> None:
        """Train for ``sum(turns)`` steps.

        Args:
            turns: Number of steps in each turn.
            after_turn: Callback that receives the index and the times of each turn after it ends. The
                duration of the call is not counted.
        """
        from transformers import TrainerCallback

        clock = StepClock(self._setting.device)
        left = list(turns)

        class TakeTurns(TrainerCallback):  # type: ignore[misc, unused-ignore]
            """Callback that stops the clock after the last step in a turn, while other loops run."""

            def __init__(self) -> None:
                self.steps_left = left.pop(0)
                self.index = 0

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                clock.start()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.tick()
                self.steps_left -= 1
                if self.steps_left == 0:
                    after_turn(self.index, Turn(clock.stop(), None))
                    self.index += 1
                    self.steps_left = left.pop(0) if left else -1
                    # The Trainer logs after this call, so the time of its logging is part of the next turn.
                    clock.start()

        settings, plan = self._setting.config.train, self._setting.prepared.batch_plan
        arguments: dict[str, Any] = {
            "output_dir": str(self._folder),
            "max_steps": sum(turns),
            "per_device_train_batch_size": plan.micro_batch_size,
            "gradient_accumulation_steps": plan.accumulation_steps,
            "optim": TRAINERS.get(settings.optimizer, "adamw_torch_fused"),
            "learning_rate": settings.learning_rate,
            "lr_scheduler_type": "constant",
            "weight_decay": settings.weight_decay,
            "adam_beta1": settings.betas[0],
            "adam_beta2": settings.betas[1],
            "adam_epsilon": settings.eps,
            "max_grad_norm": self._setting.max_norm,
            "bf16": self._setting.config.precision == "bf16",
            "fp16": self._setting.config.precision == "fp16",
            "torch_compile": bool(self._setting.config.compile),
            # This flag would make the Trainer skip DeepSpeed, whose accelerator already determines the
            # device.
            "use_cpu": self._setting.device.type == "cpu" and self._deepspeed is None,
            "deepspeed": self._deepspeed,
            "accelerator_config": {"use_configured_state": self._tell_of_cpu_ranks()},
            "dataloader_pin_memory": self._setting.device.type == "cuda",
            "train_sampling_strategy": "sequential",
            # The Trainer would remove shift_labels, because the signature of the model's forward does not
            # contain it.
            "remove_unused_columns": False,
            "logging_steps": self._logging_steps,
            "save_strategy": "no",
            "eval_strategy": "no",
            "report_to": "none",
        }
        with _quiet():
            self._build_trainer(arguments, TakeTurns()).train()

    def _build_trainer(self, arguments: dict[str, Any], callback: Any) -> Any:
        """Build the Trainer from its arguments and from the callback that takes turns."""
        from transformers import Trainer, TrainingArguments

        rows = ShiftedRows if self._setting.config.model.task == "causal-lm" else Rows
        return Trainer(
            model=self.model,
            args=TrainingArguments(**arguments),
            train_dataset=rows(self._setting.batches),
            callbacks=[callback],
        )


class TrlLoop(TrainerLoop):
    """Training loop of TRL's SFTTrainer, which gets samples that are already packed."""

    name = "TRL"

    def _build_trainer(self, arguments: dict[str, Any], callback: Any) -> Any:
        """Build the SFTTrainer from the arguments of the Trainer and from the callback that takes turns."""
        from datasets import Dataset as ArrowDataset
        from transformers import default_data_collator
        from trl.trainer import sft_config, sft_trainer

        # Do not shift the labels, because TRL computes the loss of token t + 1 from the output at token t.
        tokens = torch.cat([batch["input_ids"] for batch in self._setting.batches]).tolist()
        columns = {
            "input_ids": tokens,
            "labels": tokens,
            "position_ids": [list(range(len(tokens[0])))] * len(tokens),
        }
        packed: dict[str, Any] = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        return sft_trainer.SFTTrainer(
            model=cast("Any", self.model),
            args=sft_config.SFTConfig(**arguments, **packed),
            train_dataset=ArrowDataset.from_dict(columns),
            data_collator=default_data_collator,
            processing_class=self._setting.prepared.data.tokenizer,
            callbacks=[callback],
        )


def take_turns(
    trainer: TrainerLoop,
    others: list[Loop],
    lengths: list[int],
    before_turn: Callable[[], None] = lambda: None,
) -> dict[str, list[Turn]]:
    """Advance all loops in turns of ``lengths`` steps.

    Args:
        trainer: Loop of the Trainer, which takes the first turn of every round.
        others: Other loops, which take their turns afterward. Their order rotates in every round.
        lengths: Number of steps in each turn. The first turn is the warmup.
        before_turn: Function to call before every turn of ``others``.

    Returns:
        The turns of each loop, keyed by loop name.
    """
    contestants: list[Contestant] = [*others, trainer]
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    terminal = sys.stderr  # keep it, because sys.stderr is redirected while the Trainer runs

    def let_others(index: int, turn: Turn) -> None:
        turns[trainer.name].append(turn)
        start = index % len(others)
        # The rotation prevents a loop from always following the same loop.
        for loop in others[start:] + others[:start]:
            before_turn()
            turns[loop.name].append(loop.turn(lengths[index]))
        before_turn()
        if terminal.isatty():
            last = len(lengths) - 1
            print(f"round {index} of {last}", end="\n" if index == last else "\r", file=terminal, flush=True)

    gc.collect()
    gc.freeze()  # portable-train does the same; here, the other libraries benefit as well
    try:
        trainer.run(lengths, let_others)
    finally:
        gc.unfreeze()
    return turns


def forget_accelerators() -> None:
    """Reset Accelerate's process-wide state, so that the next measurement can configure it."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard standard output and standard error in this context. Progress lines are still formatted."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
