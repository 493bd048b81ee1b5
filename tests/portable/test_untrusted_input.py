"""Untrusted folders, data and runs: no code of them runs, and their cost is limited."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pytest
from huggingface_hub.errors import StrictDataclassError
from isal import igzip
from pyarrow import parquet
from transformers import CONFIG_MAPPING

from benchmarks import inotify
from portable.adapters.settings import resolve_adapter_folder
from portable.batch import Batch
from portable.cli import main
from portable.commands import resume_info
from portable.config import RunConfig
from portable.config.sections import ModelConfig
from portable.converters.cli import main as convert
from portable.data.sources import sharded_tokens
from portable.data.sources.pretokenized import INDEX_FILE, INDEX_FORMAT
from portable.data.sources.source import TokenSource
from portable.data.tokens import bounded_tokenizer, limited_calls, tokenize
from portable.data.tokens.chat_template import ConversationEncoder
from portable.data.tokens.tokenizer import Vocabulary, load_tokenizer
from portable.errors import UserError
from portable.model.build import load_model_config
from portable.model.config_values import check_config_values
from portable.model.training_loss import Outputs
from portable.paths import check_folder_files
from portable.reporting.html_report import main as report
from tests.portable.chat_support import NO_FRAME, TALK, record, tokenizer
from tests.portable.data_support import source
from tests.runs import SENTENCE, flags, leg, tiny

SECRET = "the password"
WRITTEN = Path(__file__).parent.parent / "published" / "tokens"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "private" / "notes.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"text": SECRET}) + "\n")
    return path


# -- code ----------------------------------------------------------------------------------------------------

EVIL = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
def made(*args, **more): Path(__file__).with_name("called").touch()
"""
NAMED = {
    "train.optimizer": "evil:made",
    "train.schedule": "evil:made",
    "train.loss": "evil:made",
    "train.callbacks": ["evil:made"],
    "model.function": "evil:made",
}


def test_read_only_commands_run_no_code_of_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config of the run names code, which is in the current folder."""
    folder = tmp_path / "run"
    assert main(flags(tiny(folder, corpus, train__steps=2))) == 0
    config = folder / "config.yaml"
    lines = config.read_text().splitlines()
    for key, value in NAMED.items():
        name = key.partition(".")[2]
        lines = [f"  {name}: {json.dumps(value)}" if one.startswith(f"  {name}:") else one for one in lines]
    config.write_text("\n".join(lines) + "\n")
    (folder / "evil.py").write_text(EVIL)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    state = folder / "checkpoints" / "step-000002" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"run": NAMED}))
    for asked in (folder, state.parent):
        main(["--resume-info", str(asked), "--backend", "cpu"])
    output = capsys.readouterr().out
    assert "train.optimizer: evil:made: cannot be checked, because --resume-info does not run" in output
    report([str(folder)])
    convert(["inspect", str(folder)])
    convert(["diff", str(folder), str(folder)])
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    capsys.readouterr()
    assert main(["--config", str(folder / "config.yaml"), "--dry-run"]) == 2
    assert "evil:made: is not run, because the code is not in this folder" in capsys.readouterr().err
    assert not {"imported", "called"} & {path.name for path in folder.iterdir()}


def test_resume_info_of_large_global_batch_is_fast() -> None:
    config = RunConfig().replaced({"train.global_batch_size": 16_000_000, "train.micro_batch_size": 1})
    start = time.process_time()
    sizes = resume_info._list_world_sizes(config)
    assert sizes[:5] == [1, 2, 4, 5, 8] and sizes[-1] == 64_000
    assert time.process_time() - start < 5


def test_shard_with_many_columns_is_parsed_fast() -> None:
    """An index of one megabyte can list 200,000 empty columns for each of 100,000 samples."""
    samples, columns = 10_000, 200_000
    offsets = 4 + 4 * (samples + 1) + 4 * np.arange(samples + 1)
    data = np.array([samples, *offsets, *range(samples)], "<u4").tobytes()
    piece: Any = {"sizes": [4] + [0] * columns, "column": 0, "dtype": "<u4", "shaped": True}
    start = time.process_time()
    documents = sharded_tokens._parse_shard_documents(data, piece)
    assert np.concatenate(documents).tolist() == list(range(samples))
    assert time.process_time() - start < 10


# -- links ---------------------------------------------------------------------------------------------------


RUN = {"config.yaml": "dry", "checkpoints/step-000002/trainer_state.json": "resume"}
COPIED = (
    "generation_config.json",
    "additional_chat_templates/x.jinja",
    "additional_chat_templates/.x.jinja",
    "adapter_config.json",
    "pipe.json",
)
OPENED: dict[str, Callable[[Path], Any]] = {
    "dry": lambda folder: main(["--output_dir", str(folder), "--dry-run"]),
    "resume": lambda folder: main(["--resume-info", str(folder / "checkpoints" / "step-000002")]),
    "data.tokenizer": lambda folder: load_tokenizer(str(folder)),
    "adapter.name_or_path": lambda folder: resolve_adapter_folder(str(folder)),
    "model.name_or_path": lambda folder: main(["--model.name_or_path", str(folder), "--dry-run"]),
}


@pytest.mark.parametrize(
    ("key", "name", "pipe"),
    [(key, name, pipe) for name, key in RUN.items() for pipe in (False, True)]
    + [(key, name, "pipe" in name) for key in [*OPENED][2:] for name in COPIED],
)
def test_untrusted_folder_with_link_or_pipe_is_rejected(
    key: str, name: str, pipe: bool, secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file outside the folder is printed or copied into a checkpoint."""
    folder = tmp_path / "strange"
    (folder / name).parent.mkdir(parents=True)
    os.mkfifo(folder / name) if pipe else (folder / name).symlink_to(secret)
    try:
        OPENED[key](folder)
        said = capsys.readouterr().err
    except UserError as error:
        said = f"error: {error}\n"
    told = "not a regular file" if pipe else "a link points outside of"
    assert said.startswith("error: " + (f"{key}: " if "." in key else "")) and said.count("\n") == 1
    assert re.search(told, said)


READING_SETTINGS = {
    "vocab": ("tokenizer_config.json", {"vocab": "{secret}"}),
    "environment": ("tokenizer_config.json", {"vocab": "/proc/self/environ"}),
    "relative": ("tokenizer_config.json", {"vocab": "../private/notes.jsonl"}),
    "home": ("tokenizer_config.json", {"vocab": "~/notes.jsonl"}),
    "merges": ("tokenizer_config.json", {"vocab": {}, "merges": "{secret}"}),
    "init_inputs": ("tokenizer_config.json", {"init_inputs": ["{secret}"]}),
    "nested": ("tokenizer_config.json", {"init_inputs": [{"x": ["{secret}"]}]}),
    "gguf_file": ("tokenizer_config.json", {"gguf_file": "{secret}"}),
    "fast_tokenizer_files": ("tokenizer_config.json", {"fast_tokenizer_files": ["../private/notes.jsonl"]}),
    "special tokens": ("special_tokens_map.json", {"vocab": "{secret}"}),
    "named token": ("special_tokens_map.json", {"extra_special_tokens": {"vocab": "{secret}"}}),
    "config": ("config.json", {"model_type": "bert", "vocab_file": "{secret}"}),
}
"""Settings with which a library opens a file of the user."""


@pytest.mark.parametrize("case", READING_SETTINGS)
def test_tokenizer_settings_with_outside_file_are_rejected(
    case: str, secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    name, settings = READING_SETTINGS[case]
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    resolved = json.loads(json.dumps(settings).replace("{secret}", str(secret)))
    base = {"tokenizer_class": "BertTokenizer"} if name == "tokenizer_config.json" else {}
    (folder / name).write_text(json.dumps({**base, **resolved}))
    monkeypatch.setenv("HOME", str(secret.parent))
    with pytest.raises(
        UserError, match=rf"^data.tokenizer: .*{name}: .* names a file outside the folder; remove"
    ):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"speaker_embeddings_path": "{secret}"}),
        ("generation_config.json", {"assistant_model": "{secret}"}),
        ("model.safetensors.index.json", {"weight_map": {"model.norm.weight": "../private/notes.jsonl"}}),
        ("pytorch_model.bin.index.json", {"weight_map": {"model.norm.weight": "{secret}"}}),
    ],
)
def test_model_settings_with_outside_file_are_rejected(
    file: str, values: dict[str, Any], secret: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / file).write_text(json.dumps({"model_type": "llama", **values}).replace("{secret}", str(secret)))
    with pytest.raises(
        UserError, match=rf"^model.name_or_path: .*{file}: .* names a file outside the folder"
    ):
        load_model_config(ModelConfig(name_or_path=str(folder), config=None))


def test_tokenizer_settings_of_published_models_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings have paths of their authors, tokens that resemble paths, and names of local folders."""
    folder = tmp_path / "tokenizer"
    tokenizer("chatml").save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "special_tokens_map_file": "/root/.cache/huggingface/hub/special_tokens_map.json",
        "tokenizer_file": "tokenizer.json",
        "name_or_path": str(tmp_path),
        "tokenizer_type": "words",
        "unk_token": "/etc/passwd",
        "separator": "/",
        "symbol": "\ud800",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "words").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer(str(folder)).unk_token == "/etc/passwd"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 20_000_000}, "num_hidden_layers: 20000000 is too large; use at most 4096"),
        ({"attention_dropout": 2.0}, "attention_dropout is 2.0; use a probability from 0 to 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"factor is 0; use a factor above 0"),
        ({"dtype": 7}, "dtype is 7; use the name of a dtype"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; use an epsilon from 0 to 1"),
        ({"hidden_size": 10**400}, "hidden_size is 10{59}.*, but must be a whole number"),
        (
            {"text_config": {"attention_dropout": -1.0}, "model_type": "gemma3"},
            "text_config.attention_dropout",
        ),
    ],
    ids=str,
)
def test_model_config_numbers_are_bounded(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **values}))
    with pytest.raises(UserError, match=f"^model.name_or_path: {tmp_path}/config.json: .*{words}"):
        load_model_config(ModelConfig(name_or_path=str(tmp_path), config=None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": ["llama"]}, r'config.json: model_type is \["llama"\], but must be a string; correct'),
        ({"architectures": "X"}, 'config.json: architectures is "X", but must be a list of strings; correct'),
        ({"id2label": {"x": 1}}, r"invalid literal for int.*; correct or restore config.json"),
        ({"attention_bias": []}, r"'attention_bias' expected bool.*; correct or restore config.json"),
        (
            {"rope_parameters": {"rope_type": []}},
            r"rope_parameters.rope_type is \[\]; use the name of a RoPE type",
        ),
        (
            {"rope_parameters": {"rope_type": {}}},
            r"rope_parameters.rope_type is \{\}; use the name of a RoPE type",
        ),
        ({"rope_scaling": {"type": 5}}, r"rope_scaling.type is 5; use the name of a RoPE type"),
        ({"rope_parameters": {"rope_theta": []}}, r"rope_parameters.rope_theta is \[\]; use a number"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, r"rope_scaling.factor is x; use a number"),
        (
            {"text_config": {}},
            r"the key text_config, but models of type llama have no separate text config; remove the key",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_model_config_error_names_impossible_setting(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    with pytest.raises(UserError, match=message):
        load_model_config(ModelConfig(name_or_path=str(tmp_path), config=None))


@pytest.mark.exhaustive
def test_model_config_defaults_are_within_bounds() -> None:
    checked = 0
    for model_type in CONFIG_MAPPING:
        with suppress(ValueError, StrictDataclassError):  # a class without valid defaults
            settings = CONFIG_MAPPING[model_type]().to_dict()
            try:
                check_config_values(model_type, settings)
            except UserError as error:
                pytest.fail(str(error))
            checked += 1
    assert checked > 500


def test_check_folder_files_limits_number_of_files(tmp_path: Path) -> None:
    """In a home folder, a check of all files would take minutes."""
    for number in range(4):
        (tmp_path / f"{number}.json").touch()
    check_folder_files("adapter.name_or_path", str(tmp_path), max_files=4)
    with pytest.raises(UserError, match=r"^adapter.name_or_path: .* has more than 3 files; use a folder"):
        check_folder_files("adapter.name_or_path", str(tmp_path), max_files=3)


def test_check_folder_files_accepts_links_to_hub_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "hash").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    check_folder_files("model.name_or_path", str(snapshot))
    (snapshot / "vocab.json").symlink_to("../../refs")
    with pytest.raises(UserError, match=r"^model.name_or_path: .*vocab.json: a link points outside of"):
        check_folder_files("model.name_or_path", str(snapshot))


# -- data ----------------------------------------------------------------------------------------------------


def card(text: str, file: str = "README.md") -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        (folder / "a.jsonl").write_text('{"text": "mine"}\n')
        configs = f"configs:\n- config_name: default\n  {text}\n".replace(
            "{private}", str(folder.parent / "private")
        )
        (folder / file).write_text(configs if file != "README.md" else f"---\n{configs}---\n")
        if file != "README.md":
            (folder / "README.md").write_text("---\nlicense: mit\n---\n")
        return folder

    return made


def shards(name: str, raw: Any = (), unpacks_to: bytes = b"", **first: Any) -> Callable[[Path], Path]:
    """Return a function that writes a Mosaic Streaming folder with a changed index and first shard."""

    def made(folder: Path) -> Path:
        shutil.copytree(WRITTEN / name, folder, dirs_exist_ok=True)
        index = json.loads((folder / "index.json").read_text())
        shard = index["shards"][0]
        shard |= first
        shard["raw_data"] |= dict(raw)
        if unpacks_to:
            (folder / shard["zip_data"]["basename"]).write_bytes(unpacks_to)
        (folder / "index.json").write_text(json.dumps(index))
        return folder

    return made


def saved(name: str) -> Callable[[Path], Path]:
    """Return a function that writes a folder of ``save_to_disk`` that names a file."""

    def made(folder: Path) -> Path:
        import datasets

        datasets.Dataset.from_dict({"text": [SECRET]}).save_to_disk(str(folder.parent / "other"))
        datasets.Dataset.from_dict({"text": ["mine"]}).save_to_disk(str(folder))
        state = json.loads((folder / "state.json").read_text())
        state["_data_files"] = [{"filename": name.format(folder.parent)}]
        (folder / "state.json").write_text(json.dumps(state))
        return folder

    return made


def linked(folder: Path) -> Path:
    (folder / "a.jsonl").symlink_to(folder.parent / "private" / "notes.jsonl")
    return folder


def pipe(name: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        return folder / name

    return made


def zipped(name: str, before: bytes, after: bytes) -> Callable[[Path], Path]:
    """Return a function that writes a file of 100 kB that decompresses to a single record of 100 MB."""

    def made(folder: Path) -> Path:
        with gzip.open(folder / name, "wb", compresslevel=9) as file:
            file.write(before)
            for _ in range(100):
                file.write(b"a" * (1 << 20))
            file.write(after)
        return folder / name

    return made


def one_cell(folder: Path) -> Path:
    table = pyarrow.table({"text": pyarrow.array(["a" * (100 << 20)], pyarrow.large_string())})
    parquet.write_table(table, folder / "cell.parquet", compression="zstd")
    return folder / "cell.parquet"


def write_flipped(folder: Path) -> Path:
    """Write a compressed file with a flipped bit, for which the decompressor raises a special error."""
    rows = b"".join(b'{"text": "words number %d of many, %d"}\n' % (n * 7919 % 10007, n) for n in range(3000))
    whole, random = gzip.compress(rows, mtime=0), Random(1)
    opener: Any = igzip.IGzipFile
    while True:
        damaged = bytearray(whole)
        damaged[random.randrange(20, len(whole) - 10)] ^= 1 << random.randrange(8)
        try:
            opener(fileobj=io.BytesIO(damaged)).read()
        except (OSError, EOFError, zlib.error):
            continue
        except Exception:
            (folder / "a.jsonl.gz").write_bytes(damaged)
            return folder / "a.jsonl.gz"


def write_arrow_of_bytes(folder: Path) -> Path:
    """Save a dataset whose texts are not UTF-8."""
    import datasets

    datasets.Dataset.from_dict({"text": ["abcdefgh" * 8]}).save_to_disk(str(folder))
    path = next(folder.glob("*.arrow"))
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"\xff\xfe\xfdd\xfff\xfeg"))
    return folder


def write_file(name: str, text: str) -> Callable[[Path], Path]:
    """Return a function that writes a file."""

    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


def link_to_secret(name: str, make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Return a function that makes a folder in which a link to the secret replaces a file."""

    def replace(folder: Path) -> Path:
        path = make(folder) / name
        path.unlink()
        path.symlink_to(folder.parent / "private" / "notes.jsonl")
        return folder

    return replace


def hidden_link(name: str, text: str) -> Callable[[Path], Path]:
    """Return a function that makes a folder whose card names a hidden link to the secret."""

    def make(folder: Path) -> Path:
        private = folder.parent / "private"
        (folder / name).symlink_to(private / "notes.jsonl" if name.endswith(".jsonl") else private)
        return card(text)(folder)

    return make


ALIASES = "data_files: &a0 [x, x]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
"""A kilobyte of YAML whose aliases expand to 2e11 values."""

DATA: dict[str, tuple[Callable[[Path], Path], str]] = {
    "card, absolute": (card("data_files: /etc/*.jsonl"), "README.md: '/etc/.*' leads out of the folder"),
    "card, above": (card("data_files: ../private/notes.jsonl"), "leads out of the folder"),
    "card, of a split": (
        card("data_files: [{split: train, path: [a.jsonl, ../private/*]}]"),
        "leads out of the folder",
    ),
    "card, folder": (card("data_dir: ../private"), "leads out of the folder"),
    "card, URL": (card('data_files: "http://127.0.0.1:9/x.jsonl"'), "is not a path inside the folder"),
    "card, chain": (card('data_files: "zip://a.txt::http://127.0.0.1:9/x"'), "is not a path inside"),
    "card, bucket": (card("data_files: s3://bucket/x.jsonl"), "is not a path inside the folder"),
    "other card": (card("data_files: ../private/*", ".huggingface.yaml"), "huggingface.yaml: .* leads out"),
    "index, above": (shards("mds", {"basename": "../private/notes.jsonl"}), "index.json: .* leads out"),
    "index, device": (shards("mds", {"basename": "/dev/zero"}), "leads out of the folder"),
    "state, above": (saved("../other/data-00000-of-00001.arrow"), "leads out of the folder"),
    "state, absolute": (saved("{}/other/data-00000-of-00001.arrow"), "leads out of the folder"),
    "index, deep": (lambda folder: deep(folder / "index.json"), "index.json: row 1: is not valid JSON"),
    "hidden link to a folder": (hidden_link(".x", "data_dir: .x"), "a link points outside of"),
    "hidden link to a file": (hidden_link(".x.jsonl", "data_files: .x.jsonl"), "a link points outside of"),
    "pipe as the card": (
        lambda folder: pipe("README.md")(card("data_dir: .")(folder)).parent,
        "not a regular",
    ),
    "pipe as the other card": (
        lambda folder: pipe(".huggingface.yaml")(card("data_dir: .")(folder)).parent,
        "not a regular file",
    ),
    "aliases": (card(ALIASES), "README.md: .* more than 1,000,000 values"),
    "other aliases": (card(ALIASES, ".huggingface.yaml"), "huggingface.yaml: .* more than 1,000,000 values"),
    "other setting": (card("metadata_file: {private}/notes.jsonl"), "names a file outside the folder"),
    "link": (linked, "a link points outside of"),
    "linked shards": (
        lambda folder: hidden_link("shards", "data_dir: .")(write_file("tokens.json", "{}")(folder).parent),
        "a link points outside of",
    ),
    "linked card": (link_to_secret("README.md", card("data_dir: .")), "README.md: a link points outside of"),
    "linked shard": (
        link_to_secret("shard.00001.mds", shards("mds")),
        "shard.00001.mds: a link points outside of",
    ),
    "linked index": (link_to_secret("index.json", shards("mds")), "index.json: a link points outside of"),
    "pipe": (pipe("a.jsonl"), "not a regular file"),
    "pipe of text": (pipe("a.txt.gz"), "not a regular file"),
    "pipe of cells": (pipe("a.csv"), "not a regular file"),
    "pipe of tokens": (pipe("a.bin"), "not a regular file"),
    "pipe in a folder": (
        lambda folder: pipe("a.jsonl")(folder).parent,
        "pipe, socket or device, not a regular file",
    ),
    "jsonl bomb": (
        zipped("a.jsonl.gz", b'{"text": "', b'"}\n'),
        "more than 64 times its .* decompress the file",
    ),
    "json bomb": (zipped("a.json.gz", b'[{"text": "', b'"}]'), "more than 64 times its"),
    "text bomb": (zipped("a.txt.gz", b"", b""), "more than 64 times its"),
    "parquet bomb": (one_cell, "more than 64 times its"),
    "shard bomb": (
        shards("mds_bytes_zstd", {"bytes": 1 << 32}, bytes(400_000)),
        r"more than 64 times its size \(400,000 bytes\)",
    ),
    "flipped bit": (write_flipped, "a.jsonl.gz: cannot be read .IsalError"),
    "bytes in arrow": (write_arrow_of_bytes, "is not UTF-8 text"),
    "index, compression": (shards("mds_bytes_zstd", compression=None), "index.json: cannot be read"),
    "index, length": (shards("mds", {"bytes": math.inf}), "index.json: cannot be read .cannot convert float"),
    "index, columns": (shards("mds", column_names=None), "index.json: cannot be read"),
    "index, encodings": (shards("mds", column_encodings=[]), "index.json: cannot be read"),
    "index, hashes": (shards("mds", {"hashes": ["sha1"]}), "cannot be read .*; copy the file again"),
    "index, sizes": (shards("mds", column_sizes=7), "cannot be read .*; copy the file again"),
    "index, empty": (
        lambda folder: write_file("index.json", '{"shards": []}')(folder).parent,
        "the file lists no shards",
    ),
    "overlap": (shards("mds", column_sizes=[1024, -1024]), r"the column sizes \[1024, -1024\] are invalid"),
}


def deep(path: Path) -> Path:
    path.write_text("[" * 200_000 + "]" * 200_000)
    return path.parent


@pytest.mark.parametrize("name", DATA)
def test_untrusted_data_stays_in_folder_and_within_bounds(name: str, tmp_path: Path, secret: Path) -> None:
    (tmp_path / "data").mkdir()
    make, told = DATA[name]
    place = str(make(tmp_path / "data"))
    with inotify.Watch(inotify.OPENED | inotify.READ) as watch:
        watch.add(secret)
        with pytest.raises(UserError, match=told) as refused:
            opened = source(place)
            opened.compute_digest()
            if isinstance(opened, TokenSource):
                list(opened.iter_token_chunks(1 << 20, None))
            else:
                found = "".join(document.text for document in opened.iter_documents())
                pytest.fail(f"read {found[:60]}")
        assert list(watch.drain()) == []
    line = str(refused.value)
    assert line.startswith("data.source: ") and line.isprintable()


LONG_NUMBER = "1" + "0" * 400


@pytest.mark.parametrize("shards", ['[[1e999, 4, "a"]]', "[[1]]", "7", "null"])
def test_damaged_token_index_is_one_line_error(shards: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(
        f'{{"format": {INDEX_FORMAT}, "made": "a", "kind": "text", "shards": {shards}}}'
    )
    with pytest.raises(
        UserError, match=rf"^data.source: .*{INDEX_FILE}: cannot be used .*; run portable-data again$"
    ):
        source(str(tmp_path), stream=True).compute_digest()


@pytest.mark.parametrize("key", ["data.columns", "data.label_field"])
def test_too_long_integer_error_names_record(key: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "words", "label": {LONG_NUMBER}, "weight": {LONG_NUMBER}}}\n')
    labelled = key == "data.label_field"
    more: dict[str, Any] = {"label_field": "label"} if labelled else {"columns": ("weight",)}
    opened = source(str(path), "sequence-classification" if labelled else "causal-lm", **more)
    with pytest.raises(UserError, match=r"a.jsonl:1: "):
        list(opened.iter_documents())


# -- templates -----------------------------------------------------------------------------------------------

SAYS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
TEMPLATES = {
    "loops": SAYS + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": SAYS + "{% set x = namespace(y=9) %}{{ (9 ** (x.y ** x.y)) > 1 }}",
    "constant": SAYS + "{% set x = 'a' * 20000000000 %}",
    "center": SAYS + "{{ 'a'|center(2000000000) }}",
    "indent": SAYS + "{{ 'a\\nb'|indent(2000000000, true) }}",
    "format": SAYS + "{{ '%2000000000d' % 1 }}",
    "json": SAYS + "{{ range(99999)|list|tojson(indent=100000) }}",
    "doubling": "{% set x = namespace(y='a') %}{% for i in range(40) %}{% set x.y = x.y + x.y %}{% endfor %}",
    "long": SAYS + "{% for i in range(200) %}{{ ('a' * 10000) }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template_time_and_memory_are_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_calls, "MAX_CALL_SECONDS", 1.0)
    chat = ConversationEncoder(tokenizer("qwen2_5"), TEMPLATES[name], NO_FRAME)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^data\.chat_template: ") as refused:
        chat.encode_documents([record({"messages": TALK})])
    assert "\n" not in str(refused.value)
    assert time.monotonic() - began < 30
    assert (
        ConversationEncoder(tokenizer("qwen2_5"), SAYS, NO_FRAME)
        .encode_documents([record({"messages": TALK})])
        .num_stopping
    )
    status = Path(f"/proc/{limited_calls._workers[os.getpid()]._process.pid}/status").read_text()
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
    assert peak < 2 << 20


# -- tokenizers ----------------------------------------------------------------------------------------------

SPLIT: dict[str, Any] = {"type": "Split", "behavior": "Isolated", "invert": False}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "pattern without end": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a+)+$"}}},  # Oniguruma panics
    "pattern too long": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "a{100000}{100000}"}}},
    "no unknown token": {"model": {"type": "WordPiece", "vocab": {"b": 0}, "unk_token": "[UNK]"}},
}


def write_tokenizer(folder: Path, **parts: Any) -> str:
    """Write a tokenizer of letters with the given parts of `tokenizer.json`."""
    model = {"type": "BPE", "vocab": {letter: number for number, letter in enumerate("abc ")}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "model": model, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(folder)


@pytest.mark.parametrize("case", TOKENIZERS)
def test_failing_tokenizer_is_one_line_error(case: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data.tokenizer: ") as refused:
        loaded = load_tokenizer(write_tokenizer(tmp_path, **TOKENIZERS[case]))
        Vocabulary.from_tokenizer(loaded)
        tokenize._encode_batch(loaded, ["a" * 40 + "c"])
    assert str(refused.value).isprintable()


def double(times: int, letter: str = "a") -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": letter}, "content": 2 * letter}] * times


BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "doubles every text": ({"normalizer": {"type": "Sequence", "normalizers": double(20)}}, "encode a text"),
    "doubles some texts": (
        {"normalizer": {"type": "Sequence", "normalizers": double(20, "c")}},
        "encode a text",
    ),
    "doubles decoded text": ({"decoder": {"type": "Sequence", "decoders": double(21)}}, "decode tokens"),
    # Each match tries a third of a million paths, and there is one match at each position.
    "backtracks": ({"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "a+a+b"}}}, "encode a text"),
    "adds tokens without end": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 1000,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"a": {"id": "a", "ids": [0] * 3000, "tokens": ["a"] * 3000}},
            }
        },
        "encode a text",
    ),
}


@pytest.mark.parametrize("case", BOMBS)
def test_endless_tokenizer_is_one_line_error(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are smaller here, because a rejected call continues until the process ends."""
    parts, action = BOMBS[case]
    monkeypatch.setattr(bounded_tokenizer, "SECONDS", 0.2)
    monkeypatch.setattr(bounded_tokenizer, "MEMORY", 1 << 25)
    with pytest.raises(UserError) as refused:
        loaded = load_tokenizer(write_tokenizer(tmp_path, **parts))
        Vocabulary.from_tokenizer(loaded)
        tokenize._encode_batch(loaded, ["a" * 1500 + "c"])
    assert str(refused.value) == (
        f"data.tokenizer: {str(tmp_path)!r} takes too much time or memory to {action}; use another "
        "tokenizer, or set data.tokenizer to null to train a tokenizer"
    )


# -- the terminal --------------------------------------------------------------------------------------------

TITLE = "\x1b]0;title\x07\x1b[2J\r"


def test_terminal_escapes_of_data_are_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither the sample of the texts at the end nor the name of the file controls the terminal."""
    data = tmp_path / f"evil{TITLE[:-1]}.jsonl"
    rows = [{"text": f"{TITLE} {number} {SENTENCE}"} for number in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = tiny(tmp_path / "run", data, train__steps=2, data__packing=False, checkpoint__export=False)
    assert main(flags(settings)) == 0
    printed, logged = capfd.readouterr(), (tmp_path / "run" / "log.txt").read_text()
    for text in (printed.err, printed.out, logged):
        assert all(line.isprintable() for line in text.replace("\t", " ").split("\n"))
    assert "\\x1b]0;title\\x07\\x1b[2J" in printed.err and "\\x1b]0;title" in logged


# -- credentials ---------------------------------------------------------------------------------------------


class Signed:
    """A custom loss that takes a key of a service."""

    def __init__(self, name: str, api_key: str) -> None: ...

    def __call__(self, outputs: Outputs, batch: Batch) -> Any:
        valid = batch["labels"] != -100
        assert outputs.log_probs is not None
        return -(outputs.log_probs * valid).sum(), valid.sum()

    needs = ("log_probs",)


def test_credentials_are_not_in_published_files(tmp_path: Path, corpus: Path) -> None:
    loss = f"{__name__}:Signed(name='sk-theNAME1', api_key='theVALUE')"
    assert leg(tmp_path / "run", corpus, {"train__loss": loss, "train__steps": 1}) == 0
    published = [*(tmp_path / "run" / "final").rglob("*"), tmp_path / "run" / "report.html"]
    texts = {path.name: path.read_bytes() for path in published if path.is_file()}
    assert b"Signed(api_key='***', name='***')" in texts["README.md"]
    assert b"Signed(" in texts["report.html"]
    assert not [name for name, text in texts.items() if b"theNAME" in text or b"theVALUE" in text]
