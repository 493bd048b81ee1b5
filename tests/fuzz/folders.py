"""Folders of a stranger at scale: whether a command reads anything outside, hangs or ends in a traceback.

    python -m tests.fuzz.folders KIND [--count 2000] [--seed 0] [--json FILE] [--strace N]

Each case is a valid folder of its kind with one to four hostile changes: a value that names a file outside
(absolute, relative, `~`, `/proc/self/environ`, `file://`, chained URLs), a link, a hidden link or a link in
a subfolder, a FIFO or a device, an alias bomb, a template or Python file that reads, deep nesting, numbers
without sense. A command of this program then reads it in a fork, which :mod:`tests.fuzz.observed` observes.
The program prints each broken promise with its case, and how many there were; `--only N` repeats one case.
`--strace N` runs N cases under strace instead, which shows the files that each process opens.
"""

# ruff: noqa: SIM905 (lists of words are easier to read as text)
from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from tests.fuzz.observed import CODE_RAN, ENVIRONMENT, MARKER, Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PUBLISHED = Path(__file__).parents[1] / "published" / "tokens"
_DAMAGED = (OSError, ValueError, TypeError, LookupError, RecursionError, yaml.YAMLError)
_FOLDERS = (".hidden", "sub", "__x", "a", "data", "additional_chat_templates", "shards")
_CODE = (
    "modeling_x.py",
    "tokenization_x.py",
    "configuration_x.py",
    "folder.py",
    "custom_generate/generate.py",
    "setup.py",
    "__init__.py",
    "conftest.py",
)
_JSON = (".json", ".jsonl", ".yaml", ".yml")
ODD: list[Any] = [None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 10**400, 1e308, -1e308, float("nan"), ""]
ODD += [float("inf"), "a", "x" * 100_000, "\x1b[2J\x07", "\u202e", "\ud800", "a\0b", [], {}, [[]], [None]]
ODD += [{"a": 1}, "é" * 3000, "../..", ".", "/"]
SPECIAL = ("/proc/self/environ", "/proc/self/cmdline", "/dev/stdin", "/dev/zero", "/etc/passwd")
SIZES = [10**6, 2 * 10**7, 2 * 10**9, 10**13]
TEXTS = (
    "{{% include '{0}' %}}",
    "{{% import '{0}' as x %}}{{{{ x }}}}",
    "{{{{ cycler.__init__.__globals__.os.popen('cat {0}').read() }}}}",
    "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{{{ open('{0}').read() }}}}",
    "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{% endfor %}}{{% endfor %}}",
    "!!python/object/apply:builtins.open ['{0}']",
    "!include {0}",
)
PATHS = (
    "{0}",
    "/{0}",
    "file://{0}",
    "file:{0}",
    "local://{0}",
    "simplecache::{0}",
    "simplecache::file://{0}",
    "filecache::file://{0}",
    "blockcache::file://{0}",
    "dir::file://{0}",
    "reference::{0}",
    "{0}\n",
    " {0}",
    "{0}/",
)


class Scratch:
    """The folders of a fuzz: secrets outside, a home folder, the current folder, and the case."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.outside, self.home, self.current = root / "outside", root / "home", root / "current"
        self.case, self.out, self.base = root / "case", root / "out", root / "base"
        self.temporary, self.hub = root / "tmp", root / "hub"
        self.folder = self.case / "folder"
        for folder in (self.outside, self.home, self.current, self.base, self.temporary, self.hub):
            folder.mkdir(parents=True)
        self.inner = self.case / "beside"
        for folder in (self.outside, self.home, self.current):
            self._write_secrets(folder)

    def _write_secrets(self, folder: Path) -> None:
        text = "\n".join(f"{MARKER}{number}" for number in range(40)) + "\n"
        rows = "".join(json.dumps({"text": f"{MARKER} note {number}"}) + "\n" for number in range(40))
        words = {MARKER: 0, "[UNK]": 1, **{chr(n): n for n in range(33, 127)}}
        contents = {
            "secret.txt": text,
            "vocab.txt": "[UNK]\n[PAD]\n[CLS]\n[SEP]\n[MASK]\n" + text,
            "vocab.json": json.dumps(words),
            "merges.txt": f"#version: 0.2\n{MARKER} a\n",
            "notes.jsonl": rows,
            "notes.csv": "text\n" + text,
            "tokenizer.4.0.json": json.dumps(
                {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": words, "merges": []}}
            ),
            "chat.jinja": "{{ '" + MARKER + "' }}",
            "config.json": json.dumps({"model_type": "llama", "note": MARKER, "hidden_size": 48}),
            "code.py": f"from pathlib import Path\nPath({str(self.root / CODE_RAN)!r}).touch()\n",
            "state.json": json.dumps({"_data_files": [], "note": MARKER}),
            "notes.yaml": f"configs: [{{config_name: default, data_files: {MARKER}}}]\n",
        }
        for name, content in contents.items():
            (folder / name).write_text(content)
        with zipfile.ZipFile(folder / "notes.zip", "w") as file:
            file.writestr("notes.jsonl", rows)

    def observer(self) -> Observer:
        """Watch the secrets."""
        return Observer(
            self.root,
            secrets=[self.outside, *sorted(self.home.iterdir()), *sorted(self.current.iterdir())],
            inside=[self.folder, self.base, self.current, self.home, self.case],
            writable=[self.out, self.temporary, self.hub],
        )

    def environment(self) -> dict[str, str]:
        """Return the environment variables of an action."""
        return {
            "HOME": str(self.home),
            "USER": "fuzz",  # libraries would look it up in /etc/passwd
            "TMPDIR": str(self.temporary),
            "HF_HOME": str(self.hub),
            "TOKENIZERS_PARALLELISM": "false",
            "XDG_CACHE_HOME": str(self.out / "cache"),
        }


def hostile_values(dice: random.Random, scratch: Scratch) -> Iterator[Any]:
    """Yield values that name something outside, or that cost too much."""
    names = sorted(path.name for path in scratch.outside.iterdir())
    while True:
        name = dice.choice(names)
        target = dice.choice([scratch.outside, scratch.outside, scratch.home]) / name
        kind = dice.randrange(16)
        if kind < 4:
            value: Any = dice.choice(PATHS[:3] if kind < 3 else PATHS).format(target)
        elif kind < 6:
            start = dice.choice([scratch.folder, scratch.current, scratch.folder / "sub"])
            value = os.path.relpath(target, start)
            value = dice.choice(["", "", "./", "a/../", ".//"]) + value
        elif kind == 6:
            value = f"~/{name}"
        elif kind == 7:
            value = name  # of the current folder
        elif kind == 8:
            value = dice.choice(SPECIAL)
        elif kind == 9:
            value = dice.choice(
                [
                    f"zip://notes.jsonl::{scratch.outside / 'notes.zip'}",
                    f"zip://notes.jsonl::file://{scratch.outside / 'notes.zip'}",
                    "hf://datasets/a/b/c.jsonl",
                    "http://127.0.0.1:9/x.jsonl",
                    "s3://bucket/x.jsonl",
                    f"{scratch.outside}/*.jsonl",
                    "../../outside/*",
                    "**/../../../outside/*.jsonl",
                    str(scratch.outside),
                ]
            )
        elif kind == 10:
            value = f"{dice.choice(['.hidden', 'sub', '__x', 'a'])}/{name}"
        elif kind == 11:
            value = dice.choice(TEXTS).format(target)
        elif kind == 12:
            value = dice.choice(SIZES)
        elif kind == 13:
            value = nest(dice.choice([60, 400, 5000]))
        else:
            value = dice.choice(ODD)
        wrap = dice.randrange(10)
        if wrap == 0:
            value = [value] * dice.choice([1, 2, 3])
        elif wrap == 1:
            value = {dice.choice(["content", "path", "file", "train", "default", "name"]): value}
        elif wrap == 2:
            key = dice.choice(["split", "path", "name", "template"])
            value = [{key: value, "split": "train", "path": value}]
        yield value


def nest(depth: int) -> Any:
    """Return lists within lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def describe(value: Any) -> str:
    """Return the start of a value, which may be nested deeply."""
    try:
        return repr(value)[:120]
    except RecursionError:
        return "nested lists"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard all printed output."""
    with (
        Path(os.devnull).open("w") as null,
        contextlib.redirect_stderr(null),
        contextlib.redirect_stdout(null),
    ):
        yield


def write_json(path: Path, value: Any) -> None:
    """Write a value, which may be nested more deeply than the encoder goes."""
    with contextlib.suppress(RecursionError):
        path.write_bytes(json.dumps(value).encode("utf-8", "surrogatepass"))
        return
    path.write_text("[" * 100_000 + "]" * 100_000)


def change_table(dice: random.Random, table: Any, keys: Sequence[str], value: Any) -> Any:
    """Put a value somewhere into a table: at a key with a value, or at a key that a library supports."""
    holder, key = table, None
    if isinstance(table, dict) and (not table or dice.random() < 0.6):
        table[dice.choice(keys)] = value
        return table
    for _ in range(dice.choice([1, 1, 2, 3, 5])):
        inner = holder if key is None else holder[key]
        if isinstance(inner, dict) and inner:
            holder, key = inner, dice.choice(list(inner))
        elif isinstance(inner, list) and inner:
            holder, key = inner, dice.randrange(len(inner))
        else:
            break
    if key is None:
        return value
    if dice.random() < 0.1 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = value
    return table


class Kind:
    """One kind of folder: valid ones, the places for hostile changes, and the commands that read them.

    Attributes:
        keys: Keys that libraries know, by the end of the file's name.
        names: Names of files that a library may open.
        bases: Functions that write a valid folder.
        made: The valid folders.
    """

    keys: ClassVar[dict[str, Sequence[str]]]
    names: ClassVar[Sequence[str]]
    bases: tuple[Callable[[Path], None], ...]

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.made: list[Path] = []
        for number, write in enumerate(self.bases):
            folder = scratch.base / str(number)
            if not folder.exists():
                folder.mkdir()
                write(folder)
            self.made.append(folder)

    def make(self, dice: random.Random) -> list[str]:
        """Make one hostile folder; return its changes."""
        scratch = self.scratch
        shutil.rmtree(scratch.case, ignore_errors=True)
        base = dice.choice(self.made)
        shutil.copytree(base, scratch.folder, symlinks=True)
        changes = [base.name]
        values = hostile_values(dice, scratch)
        for _ in range(dice.choice([1, 1, 2, 2, 3, 4])):
            # An earlier change may have damaged the file that this one would change.
            with contextlib.suppress(*_DAMAGED):
                changes.append(self._change(dice, next(values)))
        return changes

    def _change(self, dice: random.Random, value: Any) -> str:
        folder, outside = self.scratch.folder, self.scratch.outside
        files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
        tables = [p for p in files if p.suffix in _JSON or p.name in ("README.md", ".metadata.json")]
        kind = dice.randrange(20)
        if kind < 12 and tables:
            path = dice.choice(tables)
            keys = next((keys for end, keys in self.keys.items() if path.name.endswith(end)), ("path",))
            self._change_file(dice, path, keys, value)
            return f"{path.relative_to(folder)}: {describe(value)}"
        name = dice.choice([*self.names, *(str(p.relative_to(folder)) for p in files)])
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind < 15:
            targets = [outside / path.name, *sorted(outside.iterdir()), Path("/proc/self/environ")]
            target = dice.choice(targets)
            link = dice.choice([path, path, path.with_name(f".{path.name}"), folder / "sub" / path.name])
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            shown = dice.choice([str(target), os.path.relpath(target, link.parent)])
            link.symlink_to(shown)
            return f"{link.relative_to(folder)} -> {shown}"
        if kind == 15:
            link = folder / dice.choice(_FOLDERS)
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)
            link.unlink(missing_ok=True)
            link.symlink_to(dice.choice([str(outside), "../../outside", "..", "/proc/self", "/dev"]))
            return f"{link.name} -> {link.readlink()}"
        if kind == 16:
            path.unlink(missing_ok=True)
            os.mkfifo(path)
            return f"{name} is a FIFO"
        if kind == 17:
            path.unlink(missing_ok=True)
            path.mkdir()
            return f"{name} is a folder"
        if kind == 18:
            code = f"from pathlib import Path\nPath({str(self.scratch.root / CODE_RAN)!r}).touch()\n"
            for file in _CODE:
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).unlink(missing_ok=True)  # an earlier change may have made a FIFO of it
                (folder / file).write_text(code)
            return "Python files"
        text = str(value if isinstance(value, str) else dice.choice(TEXTS).format(outside / "secret.txt"))
        path.unlink(missing_ok=True)
        if dice.random() < 0.3:
            text = bomb(path.name)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return f"{name}: text {text[:80]!r}"

    def _change_file(self, dice: random.Random, path: Path, keys: Sequence[str], value: Any) -> None:
        text = path.read_text()
        if path.suffix == ".jsonl":
            lines = text.splitlines()
            number = dice.randrange(len(lines))
            table = change_table(dice, json.loads(lines[number]), keys, value)
            with contextlib.suppress(RecursionError):
                lines[number] = json.dumps(table)
            path.write_text("\n".join(lines) + "\n")
        elif path.suffix == ".json":
            write_json(path, change_table(dice, json.loads(text), keys, value))
        else:
            card = path.name == "README.md"
            settings = yaml.safe_load(text.split("---")[1] if card else text)
            table = change_table(dice, settings, keys, value)
            try:
                written = yaml.safe_dump(table) if dice.random() < 0.7 else json.dumps(table)
            except (RecursionError, yaml.YAMLError, ValueError):
                written = bomb(path.name)
            written = f"---\n{written}\n---\n" if card else written
            path.write_bytes(written.encode("utf-8", "surrogatepass"))

    def actions(self, dice: random.Random) -> Sequence[Sequence[str]]:
        """Return the commands that read the folder: the name of a program, and its arguments."""
        raise NotImplementedError


def bomb(name: str) -> str:
    """Return a text of a kilobyte that expands to very many values."""
    lines = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
    )
    lines += "configs:\n- config_name: default\n  data_files: *a11\n"
    if name == "README.md":
        return f"---\n{lines}---\n"
    return lines if name.endswith((".yaml", ".yml")) else '{"a": ' * 50_000


# -- kinds ---------------------------------------------------------------------------------------------------

SMALL_MODEL = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
_TOKENIZER_KEYS = (
    "vocab vocab_file merges merges_file init_inputs tokenizer_file gguf_file fast_tokenizer_files "
    "spm_file source_spm "
    "target_spm target_vocab_file added_tokens_file special_tokens_map_file chat_template "
    "full_tokenizer_file "
    "name_or_path tokenizer_object auto_map processor_class tokenizer_class bpe_file "
    "normalizer_file emoji_file "
    "word_shape_file word_pronunciation_file entity_vocab_file sp_model_kwargs sp_model subfolder revision "
    "mecab_kwargs sudachi_kwargs jumanpp_kwargs do_lower_case model_max_length unk_token eos_token "
    "additional_special_tokens extra_special_tokens added_tokens_decoder tokenizer_type model_type cache_dir "
    "backend config language_codes_file lang_vocab_file phonemizer_lang dict_file "
    "codes_file pretrained_vocab_file "
    "model_input_names padding_side truncation_side clean_up_tokenization_spaces from_slow use_fast "
    "_commit_hash "
    "transformers_version local_files_only proxies token force_download tokenizer_config_file "
    "chat_template_file "
    "pattern audio_tokenizer image_processor feature_extractor tok trim_offsets"
).split()
TOKENIZER_CLASSES = (
    "PreTrainedTokenizerFast BertTokenizer GPT2Tokenizer LlamaTokenizer T5Tokenizer XLMTokenizer "
    "MarianTokenizer "
    "BertJapaneseTokenizer CLIPTokenizer WhisperTokenizer ByT5Tokenizer CanineTokenizer TapasTokenizer "
    "LukeTokenizer MLukeTokenizer BartTokenizer RobertaTokenizer CTRLTokenizer BioGptTokenizer FSMTTokenizer "
    "GPTNeoXJapaneseTokenizer Speech2TextTokenizer Wav2Vec2CTCTokenizer Wav2Vec2PhonemeCTCTokenizer "
    "XLNetTokenizer PhobertTokenizer BertweetTokenizer ProphetNetTokenizer RoCBertTokenizer M2M100Tokenizer "
    "NllbTokenizer MBart50Tokenizer PLBartTokenizer ErnieMTokenizer JukeboxTokenizer TransfoXLTokenizer "
    "MgpstrTokenizer VitsTokenizer SiglipTokenizer MistralCommonBackend MistralCommonTokenizer "
    "TokenizersBackend "
    "SentencePieceBackend PythonBackend EsmTokenizer ClvpTokenizer FlaubertTokenizer HerbertTokenizer "
    "MyT5Tokenizer CpmAntTokenizer CodeGenTokenizer QDQBertTokenizer RagTokenizer SplinterTokenizer "
    "BlenderbotTokenizer DebertaV2Tokenizer AlbertTokenizer Qwen2Tokenizer GemmaTokenizer CohereTokenizer"
).split()


def write_fast_tokenizer(folder: Path) -> None:
    """Write a small byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {**{letter: number for number, letter in enumerate(letters)}, "<eos>": 256, "<pad>": 257}
    backend = Tokenizer(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<eos>' }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template=template
    )
    tokenizer.save_pretrained(folder)


def write_slow_tokenizer(name: str) -> Callable[[Path], None]:
    """Return a function that writes a tokenizer of a class without `tokenizer.json`."""

    def write(folder: Path) -> None:
        letters = [chr(number) for number in range(33, 127)]
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        if name == "BertTokenizer":
            words = [*special, *letters, *(f"##{letter}" for letter in letters)]
            (folder / "vocab.txt").write_text("\n".join(words) + "\n")
        elif name == "GPT2Tokenizer":
            words = [*letters, "Ġ", "<|endoftext|>"]
            write_json(folder / "vocab.json", {word: number for number, word in enumerate(words)})
            (folder / "merges.txt").write_text("#version: 0.2\nt h\n")
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": name})
        write_json(folder / "special_tokens_map.json", {"unk_token": "[UNK]", "pad_token": "[PAD]"})

    return write


def write_any_class(folder: Path) -> None:
    """Write a tokenizer without a vocabulary, whose class each case chooses."""
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "vocab": "x"})


class TokenizerFolder(Kind):
    """Folders of tokenizers, which a run loads, uses and saves."""

    keys: ClassVar[dict[str, Sequence[str]]] = {
        "added_tokens.json": ("a", "/proc/self/environ"),
        "tokenizer.json": (
            "model",
            "vocab",
            "merges",
            "pattern",
            "content",
            "path",
            "precompiled_charsmap",
            "type",
        ),
        "config.json": (*_TOKENIZER_KEYS, "architectures"),
        ".json": tuple(_TOKENIZER_KEYS),
    }
    names: ClassVar[Sequence[str]] = (
        "tokenizer.json vocab.txt vocab.json merges.txt spiece.model tokenizer.model "
        "tekken.json added_tokens.json "
        "special_tokens_map.json chat_template.jinja chat_template.json additional_chat_templates/x.jinja "
        "additional_chat_templates/.x.jinja tokenizer_config.json config.json processor_config.json "
        "preprocessor_config.json tokenizer.4.0.json sentencepiece.bpe.model source.spm target.spm bpe.codes "
        "tokenizer.tiktoken model.gguf video_preprocessor_config.json generation_config.json "
        "dict.txt params.json"
    ).split()
    bases = (
        write_fast_tokenizer,
        write_slow_tokenizer("BertTokenizer"),
        write_slow_tokenizer("GPT2Tokenizer"),
        write_slow_tokenizer("T5Tokenizer"),
        write_any_class,
        write_any_class,
    )

    def make(self, dice: random.Random) -> list[str]:
        changes = super().make(dice)
        path = self.scratch.folder / "tokenizer_config.json"
        if dice.random() < 0.4 and path.is_file() and not path.is_symlink():
            with contextlib.suppress(ValueError, RecursionError):
                table = json.loads(path.read_text("utf-8", "replace"))
                if isinstance(table, dict):
                    table["tokenizer_class"] = dice.choice(TOKENIZER_CLASSES)
                    write_json(path, table)
                    changes.append(table["tokenizer_class"])
        return changes

    def actions(self, dice: random.Random) -> Sequence[Sequence[str]]:
        if dice.random() < 0.1:
            settings = {
                "data.tokenizer": self.scratch.folder,
                "data.source": self.scratch.base / "text.jsonl",
            }
            return [["train", *run_flags(self.scratch, **settings), "--dry-run"]]
        return [["tokenizer", str(self.scratch.folder), str(self.scratch.out)]]

    def __init__(self, scratch: Scratch) -> None:
        super().__init__(scratch)
        write_texts(scratch.base / "text.jsonl")


def write_texts(path: Path) -> None:
    """Write some texts."""
    rows = [{"text": f"words number {number} of many, to learn from"} for number in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_flags(scratch: Scratch, **settings: Any) -> list[str]:
    """Return the flags of a tiny run."""
    merged: dict[str, Any] = {
        "backend": "cpu",
        "precision": "fp32",
        "output_dir": scratch.out / "run",
        "model.config": SMALL_MODEL,
        "data.source": scratch.base / "text.jsonl",
        "data.cache_dir": scratch.out / "cache",
        "data.seq_len": 32,
        "data.eval_fraction": 0,
        "train.steps": 2,
        "train.warmup_steps": 0,
        "train.learning_rate": 1e-3,
        "train.global_batch_size": 2,
        "train.eval_every": None,
        "checkpoint.every_steps": 1,
        "log.every_steps": 1,
        "log.trackers": [],
    }
    merged.update(settings)
    return [
        f"--{key}={value if isinstance(value, str | Path) else json.dumps(value)}"
        for key, value in merged.items()
    ]


def write_run(scratch: Scratch) -> Path:
    """Train a tiny run once, and return its folder."""
    from portable.cli import main

    folder = scratch.base / "trained"
    if not folder.exists():
        write_texts(scratch.base / "text.jsonl")
        write_fast_tokenizer(scratch.base / "tokenizer")
        flags = run_flags(scratch, **{"output_dir": folder, "data.tokenizer": scratch.base / "tokenizer"})
        with quiet():
            code = main(flags)
        assert code == 0, code
    return folder


class FromRun(Kind):
    """Kinds whose valid folders come from a tiny run."""

    bases = ()

    def __init__(self, scratch: Scratch) -> None:
        super().__init__(scratch)
        self.trained = write_run(scratch)
        for write in self.writers():
            folder = scratch.base / str(len(self.made))
            if not folder.exists():
                write(folder)
            self.made.append(folder)

    def writers(self) -> Sequence[Callable[[Path], Any]]:
        """Return the functions that write the valid folders."""
        raise NotImplementedError

    def copy_final(self, folder: Path) -> None:
        """Copy the exported model."""
        shutil.copytree(self.trained / "final", folder)


_MODEL_KEYS = (
    "model_type architectures auto_map _name_or_path name_or_path torch_dtype dtype _attn_implementation "
    "attn_implementation _experts_implementation quantization_config transformers_weights "
    "configuration_files "
    "num_hidden_layers hidden_size vocab_size num_attention_heads num_key_value_heads head_dim "
    "intermediate_size "
    "rope_scaling rope_parameters rope_theta layer_types sliding_window tie_word_embeddings hidden_act "
    "attention_dropout text_config vision_config audio_config backbone backbone_config use_timm_backbone "
    "encoder decoder adapter_path base_model_name_or_path gguf_file tokenizer_class "
    "custom_pipelines subfolder "
    "weights_path checkpoint token_file prefix task_specific_params n_layer speaker_embeddings_path "
    "max_position_embeddings initializer_range use_cache bos_token_id eos_token_id "
    "pad_token_id num_local_experts"
).split()
_GENERATION_KEYS = (
    "cache_implementation prompt_lookup_num_tokens assistant_model custom_generate compile_config "
    "watermarking_config stop_strings bad_words_ids forced_decoder_ids max_length temperature "
    "_from_model_config transformers_version constraints cache_config config_file_name "
    "eos_token_id bos_token_id"
).split()
_ADAPTER_KEYS = (
    "base_model_name_or_path peft_type target_modules modules_to_save r lora_alpha auto_mapping revision "
    "layers_pattern rank_pattern alpha_pattern init_lora_weights corda_config eva_config loftq_config "
    "megatron_config target_parameters trainable_token_indices exclude_modules task_type "
    "bias layers_to_transform"
).split()
_PROCESSOR_KEYS = (
    "processor_class image_processor_type feature_extractor_type video_processor_type tokenizer_class "
    "auto_map "
    "image_processor tokenizer feature_extractor chat_template_file chat_template audio_tokenizer "
    "class_info_file repo_path size crop_size mel_filters speaker_embeddings "
    "name_or_path audio_tokenizer_name_or_path "
    "num_frames patch_size _processor_class metadata image_mean vocab_file vocab merges"
).split()


class ModelFolder(FromRun):
    """Folders of models and adapters: `model.name_or_path`, `adapter.name_or_path`, and the converter."""

    keys: ClassVar[dict[str, Sequence[str]]] = {
        "generation_config.json": tuple(_GENERATION_KEYS),
        "adapter_config.json": tuple(_ADAPTER_KEYS),
        "index.json": ("weight_map", "metadata", "model.norm.weight"),
        "tokenizer_config.json": tuple(_TOKENIZER_KEYS),
        ".json": tuple(_MODEL_KEYS),
    }
    names: ClassVar[Sequence[str]] = (
        "config.json generation_config.json model.safetensors model.safetensors.index.json pytorch_model.bin "
        "adapter_config.json adapter_model.safetensors adapter_model.bin chat_template.jinja tokenizer.json "
        "tokenizer_config.json additional_chat_templates/x.jinja model-00001-of-00002.safetensors "
        "pytorch_model.bin.index.json .metadata quant_config.json hf_quant_config.json merged_adapters.json "
        "config.4.0.json custom_generate/generate.py modeling_x.py configuration_x.py README.md"
    ).split()

    def writers(self) -> Sequence[Callable[[Path], Any]]:
        return (self.copy_final, self._write_sharded, self._write_adapter)

    def _write_sharded(self, folder: Path) -> None:
        from safetensors.numpy import load_file, save_file

        self.copy_final(folder)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shards: list[dict[str, Any]] = [{}, {}]
        for number, (name, tensor) in enumerate(tensors.items()):
            shards[number % 2][name] = tensor
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = f"model-0000{number}-of-00002.safetensors"
            save_file(shard, folder / name, {"format": "pt"})
            weight_map |= dict.fromkeys(shard, name)
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})

    def _write_adapter(self, folder: Path) -> None:
        import numpy as np
        from safetensors.numpy import save_file

        folder.mkdir()
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {
            f"{name}.lora_A.weight": np.zeros((2, 16), "f4"),
            f"{name}.lora_B.weight": np.zeros((16, 2), "f4"),
        }
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        write_json(
            folder / "adapter_config.json",
            {
                "peft_type": "LORA",
                "base_model_name_or_path": str(self.trained / "final"),
                "r": 2,
                "lora_alpha": 2,
                "target_modules": ["q_proj"],
                "layers_to_transform": [0],
                "task_type": "CAUSAL_LM",
            },
        )

    def actions(self, dice: random.Random) -> Sequence[Sequence[str]]:
        folder = str(self.scratch.folder)
        if (self.scratch.folder / "adapter_config.json").exists() and dice.random() < 0.8:
            settings: dict[str, Any] = {
                "model.config": None,
                "model.name_or_path": self.trained / "final",
                "adapter.name_or_path": folder,
            }
            convert = ["convert", folder, str(self.scratch.out / "m"), "--base", str(self.trained / "final")]
        else:
            settings = {"model.config": None, "model.name_or_path": folder}
            convert = ["convert", folder, str(self.scratch.out / "m")]
        dry = ["train", *run_flags(self.scratch, **settings), "--dry-run"]
        return [dice.choice([dry, dry, ["convert", "inspect", folder], convert])]


class ProcessorFolder(ModelFolder):
    """Folders of models with processors, whose files the converter and the export copy."""

    keys: ClassVar[dict[str, Sequence[str]]] = {
        "processor_config.json": tuple(_PROCESSOR_KEYS),
        "generation_config.json": tuple(_GENERATION_KEYS),
        "tokenizer_config.json": tuple(_TOKENIZER_KEYS),
        ".json": (*_PROCESSOR_KEYS, *_MODEL_KEYS),
    }
    names: ClassVar[Sequence[str]] = (
        "preprocessor_config.json processor_config.json video_preprocessor_config.json chat_template.json "
        "chat_template.jinja additional_chat_templates/x.jinja additional_chat_templates/.y.jinja "
        "audio_tokenizer_config.json feature_extractor/config.json image_processor_config.json config.json "
        "tokenizer_config.json speaker_embeddings_path.json mel_filters.npz "
        "class_info.json generation_config.json"
    ).split()

    def writers(self) -> Sequence[Callable[[Path], Any]]:
        return (self._write_processor,)

    def _write_processor(self, folder: Path) -> None:
        self.copy_final(folder)
        write_json(
            folder / "preprocessor_config.json",
            {
                "image_processor_type": "CLIPImageProcessor",
                "processor_class": "LlavaProcessor",
                "size": {"height": 8},
            },
        )
        write_json(folder / "processor_config.json", {"processor_class": "LlavaProcessor", "patch_size": 14})
        write_json(
            folder / "video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor"}
        )

    def actions(self, dice: random.Random) -> Sequence[Sequence[str]]:
        folder = str(self.scratch.folder)
        show = [
            *run_flags(self.scratch, **{"model.config": None, "model.name_or_path": folder}),
            "--dry-run",
        ]
        return [
            dice.choice(
                [
                    ["train", *show],
                    ["convert", folder, str(self.scratch.out / "m")],
                    ["convert", folder, str(self.scratch.out / "m"), "--trust-remote-code-files"],
                    ["tokenizer", folder, str(self.scratch.out)],
                ][: 4 if dice.random() < 0.99 else 1]
            )
        ]


_CARD_KEYS = (
    "data_files",
    "data_dir",
    "configs",
    "config_name",
    "path",
    "split",
    "metadata_file",
    "dataset_info",
    "builder_name",
)
_INDEX_KEYS = (
    "basename filename raw_data zip_data _data_files shards chunks config column_names "
    "column_sizes column_encodings "
    "compression hashes samples bytes format version data_format data_spec chunk_bytes chunk_size features "
    "download_checksums _fingerprint splits builder_name download_config made kind _format_type"
).split()


class DataFolder(Kind):
    """Folders of data: `data.source`."""

    keys: ClassVar[dict[str, Sequence[str]]] = {
        "README.md": _CARD_KEYS,
        "huggingface.yaml": _CARD_KEYS,
        ".jsonl": ("text", "messages", "image", "images", "path"),
        ".json": tuple(_INDEX_KEYS),
    }
    names: ClassVar[Sequence[str]] = (
        "README.md .huggingface.yaml a.jsonl .a.jsonl b.txt b.csv b.parquet a.jsonl.gz index.json state.json "
        "dataset_info.json dataset_dict.json tokens.json data/a.jsonl .data/a.jsonl folder.py a.bin "
        "metadata.jsonl metadata.csv train.jsonl test.jsonl train/a.jsonl "
        "shards/000000/index.json tokenizer/tokenizer.json"
    ).split()

    @staticmethod
    def _write_rows(folder: Path) -> None:
        write_texts(folder / "a.jsonl")

    @staticmethod
    def _write_card(folder: Path) -> None:
        write_texts(folder / "a.jsonl")
        settings = {
            "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "a.jsonl"}]}]
        }
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(settings)}---\nwords\n")

    @staticmethod
    def _write_standalone(folder: Path) -> None:
        write_texts(folder / "a.jsonl")
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")
        settings = {"configs": [{"config_name": "default", "data_files": "a.jsonl", "data_dir": "."}]}
        (folder / ".huggingface.yaml").write_text(yaml.safe_dump(settings))

    @staticmethod
    def _write_saved(folder: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": ["some words to learn"] * 20}).save_to_disk(str(folder))

    @staticmethod
    def _write_saved_splits(folder: Path) -> None:
        import datasets

        table = datasets.Dataset.from_dict({"text": ["some words to learn"] * 20})
        datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(folder))

    @staticmethod
    def _write_splits(folder: Path) -> None:
        write_texts(folder / "train.jsonl")
        write_texts(folder / "test.jsonl")

    @staticmethod
    def _copy(name: str) -> Callable[[Path], None]:
        def copy(folder: Path) -> None:
            shutil.copytree(PUBLISHED / name, folder, dirs_exist_ok=True)

        return copy

    def _write_prepared(self, folder: Path) -> None:
        from portable.commands.data import main as prepare

        write_texts(self.scratch.base / "text.jsonl")
        write_fast_tokenizer(self.scratch.base / "tokenizer")
        shutil.rmtree(folder)
        config = self.scratch.base / "prepare.yaml"
        data = {
            "source": str(self.scratch.base / "text.jsonl"),
            "tokenizer": str(self.scratch.base / "tokenizer"),
        }
        write_json(
            config, {"model": {"config": SMALL_MODEL}, "data": {**data, "seq_len": 32, "eval_fraction": 0}}
        )
        with quiet():
            code = prepare(["--config", str(config), "--out", str(folder), "--processes", "1"])
        assert code == 0, code

    def __init__(self, scratch: Scratch) -> None:
        copies = [self._copy(path.name) for path in sorted(PUBLISHED.iterdir()) if path.is_dir()]
        self.bases = (
            self._write_card,
            self._write_card,
            self._write_standalone,
            self._write_rows,
            self._write_saved,
            self._write_saved_splits,
            self._write_splits,
            self._write_prepared,
            *copies,
        )
        super().__init__(scratch)

    def actions(self, dice: random.Random) -> Sequence[Sequence[str]]:
        stream = dice.random() < 0.3 or (self.scratch.folder / "tokens.json").exists()
        flags = run_flags(
            self.scratch,
            **{
                "data.source": self.scratch.folder,
                "data.tokenizer": self.scratch.base / "tokenizer",
                "data.stream": stream,
            },
        )
        return [["train", *flags, "--show-data", "1"]]


class RunFolder(FromRun):
    """Folders of runs and bare checkpoints, which commands describe, and from which a run resumes."""

    keys: ClassVar[dict[str, Sequence[str]]] = {
        "trainer_state.json": (
            "step samples seed schedule run world_size strategy backend data "
            "rng format_version skipped_steps "
            "counts path config optimizer global_batch_size"
        ).split(),
        "checkpoint_manifest.json": ("files", "path", "../x", "size", "checksum"),
        "config.yaml": ("data", "model", "train", "output_dir", "checkpoint", "log", "adapter"),
        "tokenizer_config.json": tuple(_TOKENIZER_KEYS),
        ".jsonl": ("step", "loss", "kind", "path", "text"),
        ".json": (*_MODEL_KEYS, *_GENERATION_KEYS),
    }
    names: ClassVar[Sequence[str]] = (
        "config.yaml metrics.jsonl events.jsonl data_samples.json log.txt report.html final/config.json "
        "checkpoints/step-000002/trainer_state.json checkpoints/step-000002/.metadata "
        "checkpoints/step-000002/config.json checkpoints/step-000002/checkpoint_manifest.json "
        "checkpoints/step-000002/__0_0.distcp checkpoints/step-000002/tokenizer.json "
        "checkpoints/latest checkpoints/step-000003/trainer_state.json final/README.md "
        ".run.json data_samples.jsonl"
    ).split()

    def writers(self) -> Sequence[Callable[[Path], Any]]:
        return (self._write_run, self._write_run, self._write_checkpoint)

    def _write_run(self, folder: Path) -> None:
        shutil.copytree(self.trained, folder)
        for step in sorted((folder / "checkpoints").iterdir())[:-1]:
            shutil.rmtree(step)

    def _write_checkpoint(self, folder: Path) -> None:
        shutil.copytree(sorted((self.trained / "checkpoints").iterdir())[-1], folder)

    def actions(self, dice: random.Random) -> Sequence[Sequence[str]]:
        folder = self.scratch.folder
        checkpoint = folder / "checkpoints" / "step-000002"
        checkpoint = checkpoint if checkpoint.exists() else folder
        settings = {"checkpoint.resume": checkpoint, "data.tokenizer": self.scratch.base / "tokenizer"}
        choices = [
            ["train", "--resume-info", str(folder)],
            ["report", str(folder), "--out", str(self.scratch.out / "page.html")],
            ["convert", "inspect", str(checkpoint)],
            ["convert", str(checkpoint), str(self.scratch.out / "m")],
            ["train", *run_flags(self.scratch, **settings), "--dry-run"],
        ]
        return dice.sample(choices, 2)


KINDS: dict[str, type[Kind]] = {
    "tokenizer": TokenizerFolder,
    "processor": ProcessorFolder,
    "model": ModelFolder,
    "data": DataFolder,
    "run": RunFolder,
}


def use_tokenizer(folder: str, out: str) -> int:
    """Load a tokenizer as a run does, encode texts with it and save it."""
    from portable.converters.console import print_error
    from portable.data.tokens import tokenize
    from portable.data.tokens.tokenizer import Vocabulary, compute_tokenizer_digest, load_tokenizer
    from portable.errors import UserError

    try:
        loaded = load_tokenizer(folder, offline=True)
        Vocabulary.from_tokenizer(loaded)
        tokenize._encode_batch(loaded, ["words of a text", "", "0 a \x00 é"])
        compute_tokenizer_digest(loaded)
    except UserError as error:
        print_error(f"error: {error}")
        return 2
    loaded.save_pretrained(out)
    return 0


def run_action(words: Sequence[str]) -> int:
    """Run one program in this process."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(os.environ["HF_HOME"]) / "datasets"  # set at import otherwise
    from portable.cli import main as train
    from portable.converters.cli import main as convert
    from portable.reporting.html_report import main as report

    programs: dict[str, Callable[..., int]] = {"train": train, "convert": convert, "report": report}
    if words[0] == "tokenizer":
        return use_tokenizer(*words[1:])
    return programs[words[0]](list(words[1:]))


class Fuzz:
    """Cases of one kind.

    Args:
        name: Kind of the folders.
        root: Empty scratch folder.
        seed: Seed of all cases.
    """

    def __init__(self, name: str, root: Path, seed: int = 0) -> None:
        self.scratch = Scratch(root)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._seed = seed
        self._name = name
        # The forks of the cases must not inherit threads or locks of libraries, so a fork writes the folders.
        # The modules that it imports are imported here as well: otherwise each case would take seconds.
        imported = root / "imported"
        self._in_fork(lambda: self._run_unchanged(imported))
        for module in imported.read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        gc.collect()
        gc.freeze()
        self.kind = KINDS[name](self.scratch)
        self._reset()
        self.observer = self.scratch.observer()

    def _run_unchanged(self, imported: Path) -> None:
        kind = KINDS[self._name](self.scratch)
        os.environ.update(self.scratch.environment())
        for number, base in enumerate(kind.made):
            shutil.rmtree(self.scratch.case, ignore_errors=True)
            shutil.copytree(base, self.scratch.folder)
            for words in kind.actions(random.Random(number)):
                self._reset()
                with quiet(), contextlib.suppress(BaseException):
                    run_action(words)
        imported.write_text("\n".join(sys.modules))

    @staticmethod
    def _in_fork(function: Callable[[], object]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                function()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise RuntimeError("the valid folders could not be written")

    def _reset(self) -> None:
        for folder in (self.scratch.out, self.scratch.temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def prepare(self, number: int) -> tuple[list[str], Sequence[Sequence[str]]]:
        """Make a case; return its changes and its commands."""
        dice = random.Random(f"{self._name} {self._seed} {number}")
        changes = self.kind.make(dice)
        return changes, self.kind.actions(dice)

    def run(self, number: int) -> list[tuple[str, list[str], str]]:
        """Run one case.

        Returns:
            For each command that broke a promise: the command and the changes, the promises, the output.
        """
        changes, actions = self.prepare(number)
        broken = []
        for words in actions:
            self._reset()

            def act(words: Sequence[str] = words) -> int:
                os.environ.update(self.scratch.environment())
                os.chdir(self.scratch.current)
                return run_action(words)

            started = time.monotonic()
            code, promises, printed = self.observer.run(act)
            self.seconds = max(self.seconds, time.monotonic() - started)
            self.counts[f"{words[0]}: {code}"] += 1
            if promises:
                broken.append((f"{' '.join(words)[:300]} | {changes}", promises, printed))
        return broken


_OPENED = re.compile(r"\) += \d+<(.*)>$", re.MULTILINE)
"""A file that was opened, in a line of `strace -y`: the real path of the new descriptor."""


def trace(fuzz: Fuzz, numbers: Sequence[int], out: Path) -> int:
    """Run the commands of some cases under strace; return the number of cases with reads outside.

    Strace follows this process and all its children, and shows the real path of each opened file, so that
    links and relative names need no interpretation.
    """
    reads = opened = 0
    for number in numbers:
        changes, actions = fuzz.prepare(number)
        fuzz._reset()
        log = out / f"trace-{number}"
        command = ["strace", "-f", "-y", "-qq", "-e", "trace=open,openat,openat2", "-o", str(log)]
        tracer = subprocess.Popen([*command, "-p", str(os.getpid())], stderr=subprocess.PIPE, text=True)
        while "TracerPid:\t0" in Path("/proc/self/status").read_text():
            if tracer.poll() is not None:
                raise RuntimeError(f"strace ended: {tracer.communicate()[1]}")
            time.sleep(0.01)
        for words in actions:
            pid = os.fork()
            if pid == 0:
                os.environ.update(fuzz.scratch.environment())
                os.chdir(fuzz.scratch.current)
                null = os.open(os.devnull, os.O_RDWR)
                for descriptor in (0, 1, 2):
                    os.dup2(null, descriptor)
                with contextlib.suppress(BaseException):
                    run_action(words)
                os._exit(0)
            os.waitpid(pid, 0)
        tracer.terminate()
        tracer.communicate()
        paths = _OPENED.findall(log.read_text("utf-8", "replace"))
        opened += len(paths)
        outside = sorted({path for path in paths if fuzz.observer.leaves(path, writes=False)})
        if outside:
            reads += 1
            print(f"case {number}: {changes}: {outside}", flush=True)
        log.unlink()
    print(f"{opened} files opened")
    return reads


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases of one kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.folders", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="one case, whose folder and output stay")
    parser.add_argument("--strace", type=int, default=0, metavar="N", help="run N cases under strace instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each broken promise to it")
    arguments = parser.parse_args(argv)
    if ENVIRONMENT not in os.environ:  # /proc/self/environ shows the environment at the start of a process
        variables = {ENVIRONMENT: f"{MARKER}-environment", "HF_HUB_OFFLINE": "1"}
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        command = [sys.executable, "-m", "tests.fuzz.folders", *(argv or sys.argv[1:])]
        os.execve(sys.executable, command, {**os.environ, **variables})
    import portable.commands.dry_run
    import portable.commands.resume_info
    import portable.commands.show_data  # noqa: F401

    broken = 0
    root = Path(tempfile.mkdtemp(prefix="fuzz-folders-"))
    fuzz = Fuzz(arguments.kind, root / "scratch", arguments.seed)
    numbers = range(arguments.start, arguments.start + arguments.count)
    if arguments.strace:
        broken = trace(fuzz, numbers[: arguments.strace], root)
        cases = len(numbers[: arguments.strace])
        print(f"{arguments.kind}: {cases} cases under strace, {broken} read outside")
        return 1 if broken else 0
    started = time.monotonic()
    for number in numbers if arguments.only is None else [arguments.only]:
        for case, promises, printed in fuzz.run(number):
            broken += 1
            shown = printed[-1500:] if arguments.only is None else printed
            print(f"case {number}: {promises}\n    {case}\n    {shown!r}", flush=True)
            if arguments.json is not None:
                row = {"case": number, "promises": promises, "changes": case, "printed": printed[-3000:]}
                with arguments.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    minutes = (time.monotonic() - started) / 60
    total = sum(fuzz.counts.values())
    figures = f"longest {fuzz.seconds:.1f} s, {minutes:.0f} minutes"
    print(f"{arguments.kind}: {total} commands, {broken} broke a promise, {figures}")
    print(", ".join(f"{name} {count}" for name, count in sorted(fuzz.counts.items())))
    if arguments.only is None:
        shutil.rmtree(root)
    else:
        print(fuzz.scratch.folder)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
