"""The loss of every task: a sum over the labels, plus the model's own auxiliary terms.

A step minimizes the mean loss over all labels of the global batch: cross-entropy, the loss of a classifier's
``problem_type``, or the loss that ``train.loss`` names. The model's own ``forward(labels=...)`` may add
terms, such as the load-balancing loss of a mixture of experts or a z-loss. transformers defines these for one
forward pass. Over a global batch they are averaged over the sequences: each micro-batch is weighted by its
share. The result equals transformers' loss if the global batch is one micro-batch, and does not grow with the
number of micro-batches or ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast
from weakref import WeakSet

import torch
from torch.nn import functional

from portable import plugins
from portable.data.samples.base import PART_POSITIONS, TEXT_TOKENS, count_text_tokens
from portable.errors import UserError
from portable.model.document_attention import DocumentAttention
from portable.model.freezing import COMPUTE
from portable.model.model_terms import ModelTerms, counts_last_tokens
from portable.model.parameters import adapted
from portable.model.training_loss import (
    IGNORED,
    LOGITS,
    STATISTICS,
    WEIGHT,
    Outputs,
    TrainingLoss,
    count_valid,
    training_loss,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import Tensor, nn

    from portable.backend import Batch
    from portable.config import RunConfig
    from portable.model.chunked_loss import ChunkedHead


class MetricAccumulator(Protocol):
    """Adds up what the metrics of a run need; see :class:`portable.evaluation.metrics.MetricSet`."""

    needs: Literal["logits", "predictions"] | None
    kind: str
    """What the passes are for, in messages."""

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """The sums of a micro-batch, by name."""


class PrecomputePass(MetricAccumulator):
    """Gives what ``once`` of the loss returns, instead of sums."""

    needs = None
    kind = "pass over all samples"

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        raise NotImplementedError


class Objective:
    """The training loss, as the contribution of one micro-batch.

    Args:
        model: a transformers model, not wrapped.
        global_batch_size: sequences in an optimizer step, over all ranks.
        head: computes losses in place of logits, if the model has such a head.
        loss: in place of the task's own.
        compute: The type in which the engine computes if it does not use autocast. None for the type of the
            parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        global_batch_size: int,
        head: ChunkedHead | None = None,
        loss: TrainingLoss | None = None,
        compute: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._terms = ModelTerms(model)
        self.of_routers = self._terms.of_routers
        self._sequences = global_batch_size
        self._head = head
        self._loss = loss
        self._checked = False
        self._compute = compute
        self._matched: WeakSet[nn.Module] = WeakSet()
        """Other models that have the precision of the model in training."""
        self.with_token_metrics = False
        """Whether steps measure hits and entropy beside the loss; on XLA, in one graph, they always do."""
        self._measured: tuple[str, ...] = ()
        self._attention = DocumentAttention(model)
        # Further columns are for the loss alone.
        self._takes = None if loss is None else _arguments(model)
        self._criterion = _CRITERIA.get(getattr(model.config, "problem_type", None), _cross_entropy)

    @classmethod
    def of(cls, model: nn.Module, config: RunConfig, head: ChunkedHead | None = None) -> Objective:
        """The objective of a run; sets up the noise on embeddings, if any, and dropout."""
        loss, train = training_loss(config), config.train
        if train.neftune_noise_alpha:
            shifted = config.model.task == "causal-lm" and not (loss is not None and loss.whole)
            shifted = shifted and not counts_last_tokens(model.config, config.model)
            add_noise(model, train.neftune_noise_alpha, beyond=int(shifted))
        if train.dropout is False or (train.dropout is None and loss is not None and not loss.dropout):
            without_dropout(model)
        return cls(model, train.global_batch_size, head, loss, COMPUTE.get(config.precision))

    def weight(self, batch: Batch) -> float:
        """What a micro-batch weighs in the mean, counted on the host: its labels, or as the loss says."""
        if self._loss is not None and not self._checked and (self._compiles or len(batch["labels"]) < 2):
            config: Any = self._model.config
            labels = batch["labels"].dim() == 1
            self._loss.check_on_host(
                batch, config.num_labels if labels else config.get_text_config().vocab_size
            )
            self._checked = True
        return count_valid(batch["labels"]) if self._loss is None else self._loss.weight(batch)

    @property
    def _compiles(self) -> bool:
        """Whether a look at the device's values would compile another graph."""
        return any(parameter.device.type == "xla" for parameter in self._model.parameters())

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of what is logged beside the loss; known after the first micro-batch."""
        return (*self._measured, *(() if self._loss is None else self._loss.names))

    def named(self, values: Sequence[float]) -> dict[str, float]:
        """The means of a step beside the loss, by name.

        Raises:
            UserError: if the loss did not weigh the batch as it said it would.
        """
        found = dict(zip(self.numbers, values, strict=True))
        share = found.pop(WEIGHT, 1.0)
        if self._loss is not None and abs(share - 1) > 1e-4:  # also where it is not finite
            raise UserError(self._loss.unequal(share))
        measured = {name: found.pop(name) for name in self._measured}
        found = found if self._loss is None else self._loss.named(found)
        counts = {name: measured.get(of) or 1.0 for name, of in _COUNTED.items() if name in measured}
        return found | {name: measured[name] / count for name, count in counts.items()}

    def __call__(self, model: nn.Module, batch: Batch, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run ``model``, which may be wrapped, on a micro-batch of the global batch.

        Args:
            valid: what the global batch weighs, on the device: its number of valid labels, or the sum of
                the loss's weights.

        Returns:
            the share of this micro-batch in the loss, an fp32 scalar on the device, and in :attr:`numbers`,
            ``[numbers]``; None without any. Summed over all micro-batches and ranks they are the step's.
        """
        # With SPMD, where all ranks run one program, the batch holds the sequences of all ranks.
        labels = batch["labels"]
        share = labels.shape[0] / self._sequences
        divisor = torch.where(valid > 0, valid, 1).float()
        measured = labels.dim() > 1 and not labels.is_floating_point()
        measured = measured and (self.with_token_metrics or labels.device.type == "xla")
        if self._head is not None:
            self._head.with_hits = measured
        numbers: dict[str, Tensor] = {}
        if self._loss is None:
            total, output = _passed(model, batch, self._head, self._attention, self._criterion, self._terms)
        else:
            batch = self._with_passes_before(self._loss, batch)
            outputs = self._outputs(model, batch, self._loss.needs, self._terms)
            total, numbers = self._loss(outputs, batch)
            output = outputs.model
        loss = self._terms.added(total / divisor, output, share=share)
        in_parts = self._head is not None and self._head.gave
        measured = measured and output.logits.dim() > 2  # of a class for a whole sequence there is nothing
        found = _measured(output.logits.detach(), labels, in_parts=in_parts) if measured else {}
        numbers = found | numbers
        self._measured = tuple(name for name in found if numbers[name] is found[name])
        return loss, torch.stack(list(numbers.values())) / divisor if numbers else None

    def evaluated(self, model: nn.Module, batch: Batch, measure: MetricAccumulator) -> dict[str, Tensor]:
        """The sums of ``measure`` and the summed ``loss`` of a micro-batch, without the model's own terms."""
        if isinstance(measure, PrecomputePass):
            assert self._loss is not None and self._loss.once is not None
            return self._before(self._loss, self._loss.once, batch)
        if self._loss is not None and self._loss.in_evaluation:
            return self._evaluated_by(self._loss, model, batch, measure)
        labels = batch["labels"]
        head = None if measure.needs == "logits" else self._head
        if head is not None and head.needs_chunking(labels):
            # The head makes the predictions beside the losses: no tensor has the logits of all tokens.
            head.with_hits = False
            wanted = ("losses", "predictions") if measure.needs is not None else ("losses",)
            loss, output = _passed(model, batch, head, self._attention, self._criterion, wanted=wanted)
            outputs = Outputs(output.logits[..., 1].long() if measure.needs is not None else None, None)
        else:
            loss, output = _passed(model, batch, None, self._attention, self._criterion)
            classes = measure.needs is not None and not labels.is_floating_point()
            outputs = Outputs(output.logits.argmax(dim=-1) if classes else None, output.logits)
        return {"loss": loss, **measure(outputs, batch)}

    def _evaluated_by(
        self, loss: TrainingLoss, model: nn.Module, batch: Batch, measure: MetricAccumulator
    ) -> dict[str, Tensor]:
        batch = self._with_passes_before(loss, batch)
        # Predictions are made from the logits.
        needs = loss.needs | (set() if measure.needs is None else {LOGITS})
        outputs = self._outputs(model, batch, needs)
        total, numbers = loss(outputs, batch)
        if measure.needs is not None and not batch["labels"].is_floating_point():
            assert outputs.logits is not None
            outputs = Outputs(outputs.logits.argmax(dim=-1), outputs.logits)
        own = {f"{OF_LOSS}{name}": value for name, value in numbers.items()}
        return {"loss": total, **own, **measure(outputs, batch)}

    def _with_passes_before(self, loss: TrainingLoss, batch: Batch) -> Batch:
        return batch if loss.before is None else {**batch, **self._before(loss, loss.before, batch)}

    def _before(
        self, loss: TrainingLoss, function: Callable[..., Mapping[str, Tensor]], batch: Batch
    ) -> dict[str, Tensor]:
        """What a function of the user's makes of passes without gradients."""

        def forward(other: nn.Module | None = None, *, adapter: bool = True) -> Outputs:
            attention = self._attention if other is None else DocumentAttention(other)
            head = self._head if other is None else None
            if other is not None and other not in self._matched:
                self._match_precision(other)
                self._matched.add(other)
            with nullcontext() if adapter else without_adapter(self._model):
                return _outputs(other or self._model, batch, head, attention, loss.needs, self._takes)

        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), plugins.user_code_errors(loss.key):
                return dict(function(forward, batch))
        finally:
            self._model.train(training)

    def _match_precision(self, other: nn.Module) -> None:
        """Cast the parameters of a reference or teacher, which have the precision of their files.

        It then computes as the model in training does. Under autocast, that is the type of its parameters;
        otherwise the engine casts its parameters to the compute type.

        Args:
            other: The reference or teacher.
        """
        embedding: Any = cast("Any", self._model).get_input_embeddings().weight
        dtype = embedding.dtype
        if not torch.is_autocast_enabled(embedding.device.type):
            dtype = self._compute or dtype
        for parameter in other.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)

    def _outputs(
        self, model: nn.Module, batch: Batch, needs: Collection[str], terms: ModelTerms | None = None
    ) -> Outputs:
        return _outputs(model, batch, self._head, self._attention, needs, self._takes, terms)


def token_loss(model: nn.Module, batch: Batch, head: ChunkedHead | None = None) -> Tensor:
    """Run ``model`` on a micro-batch and return the summed cross-entropy, without auxiliary terms.

    ``labels[b, t]`` is the target of ``logits[b, t]``; for classification, ``labels[b]`` of ``logits[b]``.
    Targets that are :data:`IGNORED` do not count. The result is a sum, not a mean: dividing by the valid
    tokens of the *global* batch keeps the loss exact under accumulation, padding and any world size.

    Args:
        head: avoids holding all logits at once.

    Returns:
        an fp32 scalar on the device.
    """
    return _passed(model, batch, head, DocumentAttention(model), _cross_entropy)[0]


def _passed(
    model: nn.Module,
    batch: Batch,
    head: ChunkedHead | None,
    attention: DocumentAttention,
    criterion: Criterion,
    terms: ModelTerms | None = None,
    wanted: Sequence[str] = ("losses",),
) -> tuple[Tensor, Any]:
    """Return the summed loss of a forward pass, and the model's output; with a head, what is ``wanted``."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    labels = batch["labels"]
    in_parts = head is not None and head.needs_chunking(labels)
    output = _run(model, inputs, labels, attention, terms, head if in_parts else None, wanted)
    if in_parts:
        assert output.logits.shape[:-1] == labels.shape
        return output.logits[..., 0].sum(), output
    # A config may keep the problem_type of an earlier classification task.
    criterion = criterion if labels.is_floating_point() else _cross_entropy
    return criterion(output.logits, labels), output


def _run(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    attention: DocumentAttention,
    terms: ModelTerms | None,
    head: ChunkedHead | None,
    wanted: Sequence[str] = ("losses",),
) -> Any:
    """The model's output for ``inputs``; with a ``head``, what is ``wanted`` of it in place of logits."""
    with ExitStack() as stack:
        given = stack.enter_context(attention.within(dict(inputs)))
        if terms is not None:
            given |= stack.enter_context(terms.requested(labels, inputs))
        if head is not None:
            stack.enter_context(head.giving(labels, wanted))
        return model(**given)


_COUNTED = {"mean_token_accuracy": "first labels", "entropy": "all labels"}
"""The means that steps log beside the loss, by TRL's names, and the names of what they are divided by."""
_LOGITS_AT_ONCE = 1 << 24


def _measured(logits: Tensor, labels: Tensor, *, in_parts: bool) -> dict[str, Tensor]:
    """Sums over the labels: hits of the most likely token, and entropy in nats where all logits are there.

    The hits are those of the first sequence of each sample: of a pair, of the chosen one, as in TRL.

    Args:
        logits: of all tokens; ``in_parts``, what the head gives in their place, hits last.
        labels: ``[batch, tokens]`` or ``[batch, sequences, tokens]``.
    """
    valid = labels != IGNORED
    with torch.no_grad():
        if in_parts:
            hits = logits[..., -1]
        elif labels.device.type == "xla":
            # With argmax, the logits would exist three times as often; with gather, twice, if tokens are cut.
            classes = torch.arange(logits.shape[-1], device=labels.device)
            own = torch.where(classes == labels.flatten(0, -2).unsqueeze(-1), logits, -torch.inf)
            hits = (own.amax(dim=-1) >= logits.amax(dim=-1)) & valid.flatten(0, -2)
        else:
            hits = logits.argmax(dim=-1) == labels.flatten(0, -2)
        first = slice(None, None, labels.shape[1] if labels.dim() == 3 else 1)
        counted = valid.flatten(0, -2)[first].sum().float()
        found = {"first labels": counted, "mean_token_accuracy": hits[first].sum().float()}
        if in_parts or labels.device.type == "xla":  # as with argmax
            return found
        rows, of_rows = logits.flatten(0, -2), valid.flatten()
        step = max(1, _LOGITS_AT_ONCE // rows.shape[-1])
        entropy = torch.zeros((), device=rows.device)
        for part, counts in zip(rows.split(step), of_rows.split(step), strict=True):
            log_p = part.float().log_softmax(dim=-1)
            entropy += torch.where(counts, -(log_p.exp() * log_p).sum(dim=-1), 0.0).sum()
        return found | {"all labels": valid.sum().float(), "entropy": entropy}


def _outputs(
    model: nn.Module,
    batch: Batch,
    head: ChunkedHead | None,
    attention: DocumentAttention,
    needs: Collection[str],
    takes: Collection[str] | None,
    terms: ModelTerms | None = None,
) -> Outputs:
    """What a loss gets: logits, or statistics of each position.

    A sample may be several sequences, such as a pair: ``input_ids`` are then ``[batch, sequences, tokens]``,
    which the model takes as ``[batch * sequences, tokens]``. What it gives is split again.
    """
    labels = batch["labels"]
    inputs = {
        name: tensor
        for name, tensor in batch.items()
        if name != "labels" and (takes is None or name in takes)
    }
    shape = inputs["input_ids"].shape
    several = len(shape) == 3
    if several:
        inputs = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
        labels = labels.flatten(0, 1) if labels.dim() > 1 else labels
    wanted = [name for name in STATISTICS if name in needs]
    in_parts = head is not None and wanted and LOGITS not in needs and head.needs_chunking(labels)
    output = _run(model, inputs, labels, attention, terms, head if in_parts else None, _columns(wanted))
    found: dict[str, Tensor]
    if in_parts:
        found = dict(zip(wanted, output.logits.unbind(dim=-1), strict=False))
        if "log_probs" in found:
            found["log_probs"] = -found["log_probs"]
    else:
        found = {LOGITS: output.logits} if LOGITS in needs else {}
        if wanted:
            found |= _statistics(output.logits, labels, wanted)
    if several:
        found = {name: value.unflatten(0, shape[:2]) for name, value in found.items()}
    return Outputs(**found, model=output)


def _columns(wanted: Sequence[str]) -> tuple[str, ...]:
    return tuple("losses" if name == "log_probs" else name for name in wanted)


def _statistics(logits: Tensor, labels: Tensor, wanted: Sequence[str]) -> dict[str, Tensor]:
    logits = logits.float()
    found: dict[str, Tensor] = {}
    if "log_probs" in wanted:
        losses = functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
        found["log_probs"] = -losses.view(labels.shape)
    if "log_z" in wanted:
        found["log_z"] = logits.logsumexp(dim=-1)
    if "mean_logits" in wanted:
        found["mean_logits"] = logits.mean(dim=-1)
    return found


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within this context, switch off the adapter of ``model``, which changes no parameter.

    Raises:
        UserError: if it has none.
    """
    if not adapted(model):
        raise UserError("the model has no adapter to switch off; set adapter.type, or name another reference")
    from portable.private.of_peft import switched_off  # which imports peft

    with switched_off(model):
        yield


_INPUTS = (
    "input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "position_ids", "document_lengths",
    PART_POSITIONS, TEXT_TOKENS,
)  # fmt: skip
"""What samples have for a model, whose own forward may take anything."""


def _arguments(model: nn.Module) -> frozenset[str]:
    """The entries of a batch that a model takes."""
    return frozenset((*inspect.signature(model.forward).parameters, *_INPUTS))


def shares(loss: Tensor, numbers: Tensor | None) -> Tensor:
    """What an engine returns of a micro-batch: the loss, and the numbers beside it, without gradients."""
    return loss.detach() if numbers is None else torch.cat([loss.detach()[None], numbers])


def add_noise(model: nn.Module, alpha: float, *, beyond: int = 0) -> None:
    """Add noise to the embeddings of a model in training (Jain et al., "NEFTune", 2023).

    It is uniform in ±alpha / sqrt(tokens * hidden size), with the tokens of each document, and drawn from the
    generator of dropout. A document does not see how far it is padded, or what it is packed with.

    Args:
        beyond: tokens that a document has after its inputs: one where the last is a label only.
    """
    lengths: list[Tensor] = []

    def counted(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        lengths[:] = [count_text_tokens(given)] if "input_ids" in given else []

    def noisy(module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
        if not module.training:
            return embedded
        # A decoder's inputs come second and have no mask.
        tokens = lengths.pop().unsqueeze(-1) if lengths else embedded.shape[1]
        bound = alpha * ((tokens + beyond) * embedded.shape[2]) ** -0.5
        return embedded + (torch.zeros_like(embedded).uniform_(-1, 1) * bound).to(embedded.dtype)

    whole: Any = model
    whole.register_forward_pre_hook(counted, with_kwargs=True)
    whole.get_input_embeddings().register_forward_hook(noisy)


_DROPOUTS = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)


def without_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0: of modules, an adapter's too, and of attention."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):  # models read some from their config
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def _squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    values = logits.float().reshape(labels.shape)
    return functional.mse_loss(values, torch.where(labels.isnan(), values.detach(), labels), reduction="sum")


def _binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    counts = ~labels.isnan()
    return functional.binary_cross_entropy_with_logits(
        logits.float(), torch.where(counts, labels, 0), weight=counts.float(), reduction="sum"
    )


Criterion = Callable[["Tensor", "Tensor"], "Tensor"]
_CRITERIA: dict[str | None, Criterion] = {
    "regression": _squared_error,
    "multi_label_classification": _binary_cross_entropy,
}


OF_LOSS = "loss/"
"""Begins the names of sums that a loss of the user's gives in an evaluation."""


def no_totals(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros on the host for :func:`added`, with the shapes of ``sums``."""
    return {name: torch.zeros(value.shape, dtype=_wide(value)) for name, value in sums.items()}


def added(totals: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``totals`` plus ``sums``, by name, on the device: int64 for integers, float64 for floats."""
    wide = {name: value.detach().to(_wide(value)) for name, value in sums.items()}
    return {name: totals[name] + value if name in totals else value for name, value in wide.items()}


def _wide(value: Tensor) -> torch.dtype:
    return torch.float64 if value.is_floating_point() else torch.int64
