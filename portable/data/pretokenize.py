"""Write the tokens of a source to a folder or URL before training, for ``portable-data``.

The tokens are written shard by shard, and several machines can share the work. A shard is complete
when its last file exists. ``tokens.json`` is written after all shards are complete. If a process is
killed, the next call writes the shards that it left incomplete.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from portable.converters.storage.folder_operations import create_folder, list_files_below, move_into_place
from portable.converters.storage.path_or_url import is_in_store
from portable.data.sources.documents import NoTextError
from portable.data.sources.pretokenized import (
    BEGUN_FILE,
    INDEX_FILE,
    LAST_FILE,
    TOKENIZER_FOLDER,
    ShardRecord,
    TokenIndex,
    get_shard_folder,
)
from portable.data.tokens.cache import TokenCache
from portable.data.tokens.parallel_map import map_in_order
from portable.errors import UserError, to_one_line
from portable.paths import convert_storage_errors, write_durably
from portable.temporary_folder import create_scratch_folder

if TYPE_CHECKING:
    from pathlib import Path

    from portable.converters.storage.path_or_url import AnyPath
    from portable.data.sources.source import SourceShard
    from portable.data.sources.source_kinds import StreamSource
    from portable.data.tokenization import TokenizationContext
    from portable.data.tokens.tokenize import TokenizeJob

MachinePart = tuple[int, int]
"""Index of this machine, from 0, and the number of machines that share the work."""
_EMPTY_RECORD = ShardRecord(0, 0, "")
_DRAFTS_FOLDER = ".making"
# Number of records to read in parallel, because each needs a request or the checksums of a file.
_NUM_READ_THREADS = 32


@dataclass(frozen=True)
class PretokenizeResult:
    """Result of writing the tokens of a source, possibly as one of several machines.

    A source is divided into shards, and each machine writes its part of the shards.

    Attributes:
        num_shards: Number of complete shards. Shards from previous calls and from other machines
            are included.
        num_tokens: Number of tokens in the complete shards.
        num_shards_left: Number of shards that are not complete yet. Other machines have to write
            these shards, because this machine has written all shards that were
            assigned to it.
    """

    num_shards: int
    num_tokens: int
    num_shards_left: int


def pretokenize_source(
    context: TokenizationContext,
    source: StreamSource,
    output_folder: AnyPath,
    *,
    num_processes: int,
    machine_part: MachinePart = (0, 1),
    progress: bool = False,
) -> PretokenizeResult:
    """Write the tokens of ``source`` to ``output_folder``.

    Skips shards that are already complete. Damaged shards in a local folder are written again. Also
    writes the tokenizer, and ``tokens.json`` once all shards are complete.

    Args:
        context: Tokenizer and task.
        source: Source to tokenize.
        output_folder: Folder or URL to write to.
        num_processes: Maximum number of concurrent tokenizing processes.
        machine_part: Index of this machine and number of machines. Machine ``k`` of ``n``
            writes every ``n``-th shard, starting with shard ``k``. Machines and shards are
            counted from 0.
        progress: Whether to show a progress bar.

    Returns:
        Numbers of complete shards, of their tokens, and of shards that are left for other
        machines.

    Raises:
        UserError: If the source or ``output_folder`` cannot be used, or if the folder contains
            tokens of a different source or tokenizer. Also raised if a local folder contains
            unrelated files.
        RunError: If all retries of a request to the object store have failed.
        NoTextError: If all shards are complete but contain no tokens.
    """
    drafts = (
        create_scratch_folder("portable-data")
        if is_in_store(output_folder)
        else nullcontext(output_folder / _DRAFTS_FOLDER)
    )
    try:
        with convert_storage_errors("--out"), drafts as scratch:
            job = context.build_tokenize_job(source.settings, scratch)
            if _start_or_resume_output(
                output_folder, {"files": source.cache_key, "made": job.digest}, source.name
            ):
                _save_tokenizer(context.tokenizer, output_folder / TOKENIZER_FOLDER, scratch)
            records: list[ShardRecord | None] = [None] * len(source.shards)
            _fill_in_finished_records(output_folder, records)
            assigned_shards = [
                n for n in range(machine_part[0], len(source.shards), machine_part[1]) if records[n] is None
            ]
            write = _ShardWriter(job, output_folder)
            total = sum(shard.size_bytes for shard in source.shards)
            with tqdm(total=total, unit="B", unit_scale=True, desc=source.name, disable=not progress) as bar:
                finished_bytes = (
                    source.shards[n].size_bytes for n, record in enumerate(records) if record is not None
                )
                bar.update(sum(finished_bytes))
                items = ((n, source.shards[n]) for n in assigned_shards)
                new_records = map_in_order(
                    write, items, num_processes=min(num_processes, len(assigned_shards))
                )
                for number, record in zip(assigned_shards, new_records, strict=True):
                    records[number] = record
                    bar.update(source.shards[number].size_bytes)
            if machine_part[1] > 1:
                # Other machines may have finished their shards by now.
                _fill_in_finished_records(output_folder, records)
            finished_records = [record for record in records if record is not None]
            tokens = sum(record.tokens for record in finished_records)
            if len(finished_records) == len(records):
                if not tokens:
                    raise source.build_no_text_error()
                write_durably(
                    output_folder / INDEX_FILE,
                    TokenIndex(job.digest, source.settings.data.format, tuple(finished_records)).to_json(),  # type: ignore[arg-type]
                )
                shutil.rmtree(scratch, ignore_errors=True)
            return PretokenizeResult(len(finished_records), tokens, len(records) - len(finished_records))
    except OSError as error:
        raise UserError(
            f"--out: cannot write to {output_folder} ({to_one_line(error)}); choose another folder or URL"
        ) from error


def _start_or_resume_output(output_folder: AnyPath, contents: dict[str, str], name: str) -> bool:
    """Create the output folder, or check that an existing one was begun with the same input.

    The input is described by digests of the source files and of the settings. They are stored in
    ``begun.json``. If the stored digests differ but the folder has no complete shard,
    ``begun.json`` is replaced and the output is written from scratch.

    Args:
        output_folder: Folder or URL to write to.
        contents: Digests of the source files and of the settings.
        name: Name of the source, used in error messages.

    Returns:
        Whether the output is new, which means that the tokenizer has to be saved.

    Raises:
        UserError: If the folder contains complete shards with different digests. Also raised if a
            local folder contains unrelated files.
    """
    create_folder(output_folder)
    has_begun = (output_folder / BEGUN_FILE).is_file()
    if has_begun:
        with suppress(ValueError):
            if (
                json.loads((output_folder / BEGUN_FILE).read_bytes()) == contents
                and (output_folder / TOKENIZER_FOLDER).is_dir()
            ):
                return False
        if any(name.endswith(LAST_FILE) for name in list_files_below(output_folder / "shards")):
            raise UserError(
                f"--out: {output_folder} contains output that does not match {name}, because the files, the "
                "tokenizer, the chat template or other data settings differ; choose another folder or URL, "
                "or remove the existing output"
            )
    elif not is_in_store(output_folder) and any(
        path.name != _DRAFTS_FOLDER for path in output_folder.iterdir()
    ):
        raise UserError(f"--out: {output_folder} is not empty; choose an empty or a new folder")
    write_durably(output_folder / BEGUN_FILE, json.dumps(contents) + "\n")
    return True


def _fill_in_finished_records(output_folder: AnyPath, records: list[ShardRecord | None]) -> None:
    """Read the record of each complete shard whose item in ``records`` is None.

    The record is read from the output folder, where another process may have written it.

    Args:
        output_folder: Folder or URL of the shards.
        records: Record of each shard, or None if it has not been read yet. Modified in place.
    """
    missing = [number for number, record in enumerate(records) if record is None]
    names = list_files_below(output_folder / "shards")
    missing = [number for number in missing if f"{number:06}/{LAST_FILE}" in names]
    with ThreadPoolExecutor(_NUM_READ_THREADS) as pool:
        read_records = pool.map(
            lambda number: _read_shard_record(get_shard_folder(output_folder, number)), missing
        )
        for number, record in zip(missing, read_records, strict=True):
            records[number] = record


def _read_shard_record(folder: AnyPath) -> ShardRecord | None:
    """Read the record of a shard from its folder or URL.

    Returns:
        The record. None if the shard is incomplete, or if it is a damaged local shard.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        meta = json.loads((folder / LAST_FILE).read_bytes())
        if not meta["documents"]:
            return _EMPTY_RECORD
        if not is_in_store(folder):
            return (
                None if (tokens := TokenCache.open_if_intact(folder)) is None else _build_shard_record(tokens)
            )
        return ShardRecord(int(meta["documents"]), sum(meta["tokens"].values()), str(meta["fingerprint"]))
    return None


def _build_shard_record(tokens: TokenCache) -> ShardRecord:
    """Build the record of a shard from its token cache."""
    return ShardRecord(tokens.num_documents, tokens.num_tokens, tokens.fingerprint)


@dataclass(frozen=True)
class _ShardWriter:
    """Callable that tokenizes one shard and writes its tokens.

    It can be pickled for worker processes. The argument is a pair of the shard's number and the
    shard. For a shard without text, only a file that marks the shard as complete is written.

    Attributes:
        job: Job whose method ``tokenize_shard`` tokenizes a shard. It contains all settings that
            determine the tokens.
        output_folder: Folder or URL of the output. Each shard has its own folder in it.
    """

    job: TokenizeJob
    output_folder: AnyPath

    def __call__(self, item: tuple[int, SourceShard]) -> ShardRecord:
        number, shard = item
        folder = get_shard_folder(self.output_folder, number)
        try:
            tokens = self.job.tokenize_shard(shard)
        except NoTextError:
            create_folder(folder)
            write_durably(folder / LAST_FILE, json.dumps({"documents": 0}) + "\n")
            return _EMPTY_RECORD
        record = _build_shard_record(tokens)
        with convert_storage_errors("--out"):
            move_into_place(tokens.folder, folder, last_file_name=LAST_FILE)
        return record


def _save_tokenizer(tokenizer: Any, folder: AnyPath, scratch: Path) -> None:
    """Write the tokenizer to ``scratch``, and then move or upload it to ``folder``."""
    tokenizer.save_pretrained(scratch / TOKENIZER_FOLDER)
    move_into_place(scratch / TOKENIZER_FOLDER, folder)
