"""Compute the values that a loss needs for each sample, once before training.

Examples are the log-probabilities of a reference model or a teacher. The loss defines a function
``once``, which computes the values with the weights at the start of the run. The values are stored
in the data cache, and become columns of every batch.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from portable import plugins
from portable.adapters.settings import find_adapter_weights, resolve_adapter_folder
from portable.config.sources import get_training_sources
from portable.converters import open_checkpoint
from portable.converters.fingerprints import compute_fingerprint
from portable.data.samples.loader import EvalLoader
from portable.data.tokens.cache import CacheDamagedError, CheckedArray, ChecksummedFile
from portable.errors import UserError, to_one_line
from portable.model.loss import PrecomputePass
from portable.model.pretrained import fetch_model_folder
from portable.model.training_loss import build_training_loss
from portable.paths import convert_checkpoint_errors, get_default_cache_dir
from portable.temporary_folder import create_scratch_folder, open_or_build_cache_folder
from portable.terminal import shows_run_progress_bars

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from portable.backend import Backend, Engine
    from portable.config import RunConfig
    from portable.data.dataset import RunData
    from portable.data.samples.base import Arrays, Samples
    from portable.model.training_loss import TrainingLoss
    from portable.run.stages import PreparedRun

_MICRO_BATCHES_PER_EXCHANGE = 64  # micro-batches between two exchanges of the ranks' results
_VALUES, _META = "values.bin", "meta.json"
_FLOAT = np.dtype("<f4")


def check_precompute_settings(config: RunConfig, loss: TrainingLoss | None) -> None:
    """Check that the settings of a run allow its loss to precompute values for each sample.

    Only a loss with a function ``once`` is checked. The function ``once`` computes the values
    before training, for example the log-probabilities of a reference model.

    Args:
        config: Config of the run.
        loss: Training loss. None if the run uses the default loss.

    Raises:
        UserError: If the micro-batch size is ``auto``, or if the data is streamed.
    """
    if loss is None or loss.once is None:
        return
    if config.train.micro_batch_size == "auto":
        raise UserError(
            f"train.micro_batch_size: auto cannot be used with {loss.key}, because this loss computes values "
            "of each sample before training; set train.micro_batch_size to a number"
        )
    if any(source_config.stream for source_config in get_training_sources(config.data).values()):
        raise UserError(
            f"{loss.key}: needs all samples before training, but a stream is read during training; set "
            "data.stream to false"
        )


def compute_reference_digest(config: RunConfig) -> str | None:
    """Compute a digest of the loss's reference weights.

    The reference weights are the weights of the model that the loss names, or the weights that the
    run starts from. In the second case, the digest also depends on the seed, because the seed
    determines weights that no file contains. Files that are not on this machine are downloaded.

    Returns:
        The digest, or None if the loss has no reference weights.

    Raises:
        UserError: If the weights cannot be read.
    """
    loss, model, adapter = build_training_loss(config), config.model, config.adapter.name_or_path
    if loss is None or (loss.once is None and loss.reference is None):
        return None
    # Include the seed, because it determines the weights that no file contains: a new adapter, and the rows
    # of new tokens.
    folders: dict[str, Path | None] = {str(config.seed): None}
    if loss.reference is not None:
        folders = {loss.key: fetch_model_folder(loss.reference, f"{loss.key}: reference")}
    elif not model.from_scratch:
        folders["model.name_or_path"] = fetch_model_folder(str(model.name_or_path))
    if loss.reference is None and adapter is not None:
        folders["adapter.name_or_path"] = find_adapter_weights(resolve_adapter_folder(adapter))
    fingerprints = {}
    for key, folder in folders.items():
        with convert_checkpoint_errors(key):
            fingerprints[key] = None if folder is None else compute_fingerprint(open_checkpoint(folder))
    return hashlib.blake2b(json.dumps(fingerprints).encode(), digest_size=16).hexdigest()


def attach_precomputed_tables(
    config: RunConfig, backend: Backend, data: RunData, reference: str | None
) -> None:
    """Attach a table of precomputed values to each dataset in ``data``, if the loss needs them.

    This function neither computes nor reads values. A table only refers to its folder in the cache,
    which may not exist yet. :func:`precompute_columns` later fills the missing tables.

    Args:
        config: Config of the run.
        backend: Backend of this rank.
        data: Data of the run. Its training and evaluation samples are modified.
        reference: Result of :func:`compute_reference_digest`.

    Raises:
        UserError: If the values cannot be computed under this backend or these settings.
    """
    loss = build_training_loss(config)
    if loss is None or loss.once is None:
        return
    check_precompute_settings(config, loss)
    if backend.one_program and backend.world_size > 1:
        raise UserError(
            f"{loss.key}: this loss computes values before training, but XLA does not "
            "support such losses on several hosts; use a loss without a reference model"
        )
    root = Path(config.data.cache_dir) if config.data.cache_dir else get_default_cache_dir()

    samples_by_name = {"training": data.train} | {
        f"evaluation {name}": eval_samples for name, eval_samples in data.evals.items()
    }
    for name, samples in samples_by_name.items():
        samples.compute_extra_columns = PrecomputedTable(
            root / "computed" / _compute_table_digest(config, data, name, samples, reference)
        )


def _compute_table_digest(
    config: RunConfig, data: RunData, name: str, samples: Samples, reference: str | None
) -> str:
    """Compute a digest of everything that determines the precomputed values of ``samples``.

    Precomputed values are values that a loss needs for each sample, such as the log-probabilities
    of a reference model. They are stored as a table in the data cache. The digest is the name of
    the table's folder.

    Args:
        config: Config of the run.
        data: Data of the run.
        name: Name of the set of samples, such as ``training``.
        samples: Set of samples.
        reference: Result of :func:`compute_reference_digest`.
    """
    model, settings = config.model, config.data
    content = [
        name,
        len(samples),
        data.fingerprint,
        dict(data.eval_fingerprints),
        config.train.loss,
        plugins.compute_plugin_digest(config.train.loss or ""),
        model.model_dump(mode="json"),
        config.adapter.model_dump(mode="json"),
        plugins.compute_plugin_digest(model.function or ""),
        reference,
        config.precision,
        (settings.seq_len, settings.truncation, settings.eval_fraction, settings.packing),
    ]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def find_samples_to_precompute(prepared: PreparedRun) -> list[Samples]:
    """Find the datasets whose table of precomputed values is missing or damaged on some rank.

    This is a collective call.

    Returns:
        The training samples, evaluation samples, or both. Empty if the loss needs no tables, or if
        all tables exist.
    """
    incomplete = []
    for samples in (prepared.data.train, *prepared.data.evals.values()):
        if isinstance(table := samples.compute_extra_columns, PrecomputedTable):
            is_missing = table.open_if_intact(table.folder) is None
            if prepared.backend.reduce_any(is_missing):
                incomplete.append(samples)
    return incomplete


def precompute_columns(prepared: PreparedRun, engine: Engine, incomplete_samples: list[Samples]) -> None:
    """Compute the missing tables of precomputed columns, and write them to the cache.

    Each table contains extra columns for the samples of one dataset. This is a collective
    operation: all ranks must call the function. The first rank of each node writes the tables.

    Args:
        prepared: The run.
        engine: Engine with the weights that the run starts from.
        incomplete_samples: Samples whose table is missing. Result of
            :func:`find_samples_to_precompute`.
    """
    for samples in incomplete_samples:
        table, samples.compute_extra_columns = samples.compute_extra_columns, None
        assert isinstance(table, PrecomputedTable)
        shapes: dict[str, list[int]] = {}
        rows = _iter_computed_rows(prepared, engine, samples, shapes)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            # Compute into a scratch folder first: a rank that waits for the lock of the cache would block the
            # collectives of the other ranks.
            with create_scratch_folder("portable-computed") as draft:
                write_precomputed_table(draft, shapes, rows)
                open_or_build_cache_folder(
                    table.folder, table.open_if_intact, partial(copytree, draft, dirs_exist_ok=True)
                )
        for _ in rows:  # ranks that do not write take part in the collectives
            pass
        samples.compute_extra_columns = table
        prepared.backend.barrier()


def _iter_computed_rows(
    prepared: PreparedRun, engine: Engine, samples: Samples, shapes: dict[str, list[int]]
) -> Iterator[npt.NDArray[np.float64]]:
    """Compute the values that the loss needs for each sample, and yield them in blocks of rows.

    The values have named columns, for example the log-probabilities of a reference model. Each row
    contains the columns of one sample, flattened and concatenated. The rows have the order of the
    samples. This is a collective call.

    Args:
        prepared: The run.
        engine: Engine with the weights that the run starts from.
        samples: Samples for which the values are computed.
        shapes: Mapping to fill. It receives the shape of each column's value for one sample, keyed
            by column name. It is complete when the first block is yielded.

    Yields:
        Rows of consecutive samples, gathered from all ranks, float64 ``[samples, values per
        sample]``.
    """
    backend, size, remaining = prepared.backend, prepared.batch_plan.micro_batch_size, len(samples)
    loader = EvalLoader(samples, batch_size=size, rank=backend.rank, world_size=backend.world_size)
    bar = tqdm(
        loader, unit="batch", desc="computing once", leave=False, delay=1.0,
        disable=backend.rank != 0 or not shows_run_progress_bars(),
    )  # fmt: skip
    pending: list[Any] = []
    for number, batch in enumerate(bar, start=1):
        columns = engine.evaluate_batch(backend.copy_to_device(batch), PrecomputePass(), {})
        shapes |= {name: list(value.shape[1:]) for name, value in columns.items()}
        flat = np.array(backend.read_to_host(list(columns.values())))
        counts = np.cumsum([value.numel() for value in columns.values()])[:-1]
        parts = [part.reshape(size, -1) for part in np.split(flat, counts)]
        pending.append(np.concatenate(parts, axis=1).tolist())
        if number % _MICRO_BATCHES_PER_EXCHANGE == 0 or number == len(loader):
            ranks = [json.loads(text) for text in backend.gather_text(json.dumps(pending))]
            rows = np.array([row for batches in zip(*ranks, strict=True) for part in batches for row in part])
            pending = []
            yield rows[:remaining]
            remaining -= len(rows[:remaining])


# -- the table ---------------------------------------------------------------------------------------------


def write_precomputed_table(
    folder: Path, shapes: dict[str, list[int]], row_blocks: Iterable[npt.NDArray[Any]]
) -> None:
    """Write a table with one row per sample, and its checksums, into an empty folder.

    Args:
        folder: Folder of the table.
        shapes: Shape of one sample's value in each column, keyed by column name. The dict is only
            read after the last block. The iterator ``row_blocks`` may therefore fill it while it
            yields blocks.
        row_blocks: Blocks of rows ``[samples, numbers]``, in order. A row contains the flattened
            values of all columns. The values are stored as float32.
    """
    count, file = 0, ChecksummedFile(folder / _VALUES, _FLOAT)
    for part in row_blocks:
        file.write(part)
        count += len(part)
    file.close()
    meta = {"shapes": shapes, "samples": count, "sums": file.blocks.to_array().tolist()}
    (folder / _META).write_text(json.dumps(meta), "utf-8")


class TableContents(NamedTuple):
    """Shapes and values of an opened table of precomputed columns."""

    shapes: dict[str, list[int]]
    """Shape of one row of each column, keyed by the column's name."""
    values: CheckedArray
    """Values of all columns, flattened and concatenated for each sample, float32 ``[samples, numbers]``."""


@dataclass
class PrecomputedTable:
    """Table in the data cache with the precomputed columns of each sample.

    ``Samples.compute_extra_columns`` refers to the table, and calls it with sample indices to add
    the columns to a batch. The files are opened on first use.

    Attributes:
        folder: Folder of the table. It may not exist yet.
    """

    folder: Path
    _contents: TableContents | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle for a data worker. The open file is omitted.

        The worker opens the file again.
        """
        return {"folder": self.folder, "_contents": None}

    def open_contents(self) -> TableContents:
        """Open the table, if it is not open yet.

        Only the metadata and the size of the values are checked. Checksums are verified when values
        are read.

        Raises:
            CacheDamagedError: If the folder does not exist, or if this check fails.
        """
        if self._contents is None:
            path = self.folder / _VALUES
            try:
                meta = json.loads((self.folder / _META).read_text("utf-8"))
                width = sum(int(np.prod(shape)) for shape in meta["shapes"].values())
                if path.stat().st_size != meta["samples"] * width * _FLOAT.itemsize:
                    raise CacheDamagedError(f"{path}: is damaged; run the same command again")
                sums = np.array(meta["sums"], dtype="<u4")
                self._contents = TableContents(meta["shapes"], CheckedArray(path, _FLOAT, sums, width))
            except (CacheDamagedError, MemoryError):
                raise
            except Exception as error:  # the file may hold any values
                raise CacheDamagedError(
                    f"{self.folder}: is damaged ({to_one_line(error)}); run the same command again"
                ) from error
        return self._contents

    def open_if_intact(self, _: Path) -> PrecomputedTable | None:
        """Return this table if it can be opened, otherwise None.

        The argument is ignored. It exists because ``open_or_build_cache_folder`` calls this method
        with the folder, which is already an attribute of this table.
        """
        try:
            self.open_contents()
        except CacheDamagedError:
            return None
        return self

    def __call__(self, indices: Sequence[int]) -> Arrays:
        """Return the precomputed values of the given samples, as one array per column.

        Returns:
            Float32 arrays of shape ``[len(indices), *shape]``, keyed by column name, where
            ``shape`` is the shape of a single value of the column.

        Raises:
            CacheDamagedError: If the table cannot be opened.
            RunError: If the stored values are damaged. The next launch then computes the table
                again.
        """
        shapes, values = self.open_contents()
        rows, offset, arrays = values[list(indices)], 0, {}
        for name, shape in shapes.items():
            width = int(np.prod(shape))
            arrays[name] = rows[:, offset : offset + width].reshape(len(indices), *shape).copy()
            offset += width
        return arrays
