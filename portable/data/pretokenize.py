"""Write the tokens of the sources of a run ahead of time: shard by shard, in parallel, and resumable.

Each shard appears whole, and ``tokens.json`` last. What a killed process left is made again.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from portable.converters.storage.folder_operations import files_below, make_folder, put_folder
from portable.converters.storage.path_or_url import in_store
from portable.data.sources.documents import NoTextError
from portable.data.sources.pretokenized import (
    BEGUN,
    INDEX,
    LAST,
    TOKENIZER,
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

    from portable.converters.storage.path_or_url import Place
    from portable.data.sources.source import SourceShard
    from portable.data.sources.source_kinds import StreamedFiles
    from portable.data.tokenization import TokenizationContext
    from portable.data.tokens.tokenize import TokenizeJob

MachinePart = tuple[int, int]
"""Number of this machine, from 0, and the number of machines that share the work."""
_EMPTY = ShardRecord(0, 0, "")
_DRAFTS = ".making"
_READS = 32  # records that are read at a time: one is a request, or a file and its checksums


@dataclass(frozen=True)
class PretokenizeResult:
    """What was written for a source.

    Attributes:
        shards, tokens: of the source, as far as it is written.
        left: shards that other machines have to write.
    """

    shards: int
    tokens: int
    left: int


def pretokenize_source(
    context: TokenizationContext,
    source: StreamedFiles,
    out: Place,
    *,
    processes: int,
    part: MachinePart = (0, 1),
    progress: bool = False,
) -> PretokenizeResult:
    """Write the tokens of ``source`` to ``out``.

    Args:
        processes: that tokenize at a time.
        part: number of this machine and how many there are; each makes every so many-th shard.

    Raises:
        UserError: if the source or ``out`` cannot be used, or ``out`` has the tokens of something else.
    """
    drafts = create_scratch_folder("portable-data") if in_store(out) else nullcontext(out / _DRAFTS)
    try:
        with convert_storage_errors("--out"), drafts as scratch:
            job = context.build_job(source.settings, scratch)
            if _begin_output(out, {"files": source.key, "made": job.digest}, source.name):
                _save_tokenizer(context.tokenizer, out / TOKENIZER, scratch)
            records: list[ShardRecord | None] = [None] * len(source.parts)
            _read_records(out, records)
            mine = [n for n in range(part[0], len(source.parts), part[1]) if records[n] is None]
            write = _ShardWriter(job, out)
            total = sum(shard.bytes for shard in source.parts)
            with tqdm(total=total, unit="B", unit_scale=True, desc=source.name, disable=not progress) as bar:
                done = (source.parts[n].bytes for n, record in enumerate(records) if record is not None)
                bar.update(sum(done))
                items = ((n, source.parts[n]) for n in mine)
                new_records = map_in_order(write, items, processes=min(processes, len(mine)))
                for number, record in zip(mine, new_records, strict=True):
                    records[number] = record
                    bar.update(source.parts[number].bytes)
            if part[1] > 1:
                _read_records(out, records)  # the others may have ended meanwhile
            finished_records = [record for record in records if record is not None]
            tokens = sum(record.tokens for record in finished_records)
            if len(finished_records) == len(records):
                if not tokens:
                    raise source.build_no_text_error()
                write_durably(
                    out / INDEX,
                    TokenIndex(job.digest, source.settings.data.format, tuple(finished_records)).to_json(),  # type: ignore[arg-type]
                )
                shutil.rmtree(scratch, ignore_errors=True)
            return PretokenizeResult(len(finished_records), tokens, len(records) - len(finished_records))
    except OSError as error:
        raise UserError(
            f"--out: cannot write in {out} ({to_one_line(error)}); choose another place"
        ) from error


def _begin_output(out: Place, contents: dict[str, str], name: str) -> bool:
    """Note what ``out`` is made of, or compare it with that; return whether it has to be begun."""
    make_folder(out)
    has_begun = (out / BEGUN).is_file()
    if has_begun:
        with suppress(ValueError):
            if json.loads((out / BEGUN).read_bytes()) == contents and (out / TOKENIZER).is_dir():
                return False
        if any(name.endswith(LAST) for name in files_below(out / "shards")):
            raise UserError(
                f"--out: {out} was begun with other files, another tokenizer or template than those of "
                f"{name}; choose another place, or remove it"
            )
    elif not in_store(out) and any(path.name != _DRAFTS for path in out.iterdir()):
        raise UserError(f"--out: {out} is not empty; choose an empty or new folder")
    write_durably(out / BEGUN, json.dumps(contents) + "\n")
    return True


def _read_records(out: Place, records: list[ShardRecord | None]) -> None:
    """Fill in the records of the shards that are whole by now."""
    missing = [number for number, record in enumerate(records) if record is None]
    names = files_below(out / "shards")
    missing = [number for number in missing if f"{number:06}/{LAST}" in names]
    with ThreadPoolExecutor(_READS) as pool:
        read_records = pool.map(lambda number: _read_record(get_shard_folder(out, number)), missing)
        for number, record in zip(missing, read_records, strict=True):
            records[number] = record


def _read_record(folder: Place) -> ShardRecord | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        meta = json.loads((folder / LAST).read_bytes())
        if not meta["documents"]:
            return _EMPTY
        if not in_store(folder):
            return None if (tokens := TokenCache.open_if_intact(folder)) is None else _build_record(tokens)
        return ShardRecord(int(meta["documents"]), sum(meta["tokens"].values()), str(meta["fingerprint"]))
    return None


def _build_record(tokens: TokenCache) -> ShardRecord:
    return ShardRecord(tokens.documents, tokens.total_tokens, tokens.fingerprint)


@dataclass(frozen=True)
class _ShardWriter:
    """Writes one shard; in other processes, too."""

    job: TokenizeJob
    out: Place

    def __call__(self, item: tuple[int, SourceShard]) -> ShardRecord:
        number, shard = item
        folder = get_shard_folder(self.out, number)
        try:
            tokens = self.job.tokenize_shard(shard)
        except NoTextError:
            make_folder(folder)
            write_durably(folder / LAST, json.dumps({"documents": 0}) + "\n")
            return _EMPTY
        record = _build_record(tokens)
        with convert_storage_errors("--out"):
            put_folder(tokens.folder, folder, last=LAST)
        return record


def _save_tokenizer(tokenizer: Any, folder: Place, scratch: Path) -> None:
    tokenizer.save_pretrained(scratch / TOKENIZER)
    put_folder(scratch / TOKENIZER, folder)
