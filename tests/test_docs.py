"""The pages: links have targets, snippets are valid, and every command runs here or has its requirements.

A block of commands has a comment before it: ``<!-- runs -->``, and then it is run here unchanged, or ``<!--
needs: ... -->``, and then at least its ``portable-train`` commands are read by the real parser. Blocks run in
bash, with the programs of :mod:`tests.zygote` on its PATH. A block of YAML is a run's config, read by the
real schema, unless a comment describes it otherwise. ``# name.yaml`` as its first line makes it a file for
the commands of its page.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import portable
from portable import converters, losses
from portable.command_line import parse_train_args
from portable.config import load_config
from portable.converters.commands import BY_SIGNAL, EXIT_CODES
from portable.errors import UserError
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from tests.portable.chat_support import tokenizer
from tests.runs import TINY_MODEL, configured
from tests.tiny_models import tiny_model
from tests.xla import QUICK
from tests.zygote import LIBRARY, Zygote

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*GUIDES, *sorted(path for path in (ROOT / "docs").glob("*.md") if path.stem != "config")]
FIRST_PAGE = ROOT / "docs" / "index.md"
COMMANDS = ("sh", "bash", "console")
PROGRAMS = ("portable-train", "portable.cli")
README_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Hub ID of the model that README fine-tunes. A folder with this name has a tiny model instead."""
UNSAID = ("output_dir:", "log: {sample_tokens: 4}\noutput_dir:")
"""Replacement without the generated text after each evaluation, which needs one pass per token."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Page of the block.
        line: Number of the line with its fence, from 1.
        language: Language after the fence.
        comment: Comment in the line before the fence, or an empty string.
        text: Text between the fences.
    """

    page: Path
    line: int
    language: str
    comment: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text("utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if line.startswith("```") and start is None:
            start = number
        elif line == "```" and start is not None:
            found = re.fullmatch(r"<!-- (.*) -->", lines[start - 1])
            comment = found[1] if found else ""
            yield Block(
                page, start + 1, lines[start][3:], comment, "\n".join(lines[start + 1 : number]) + "\n"
            )
            start = None
    assert start is None, f"{page}: a block has no end"


def of(*languages: str, pages: list[Path] = PAGES) -> list[Block]:
    return [block for page in pages for block in blocks(page) if block.language in languages]


def files(page: Path) -> dict[str, str]:
    """Return the files of YAML and Python that a reader of a page should write."""
    name = re.compile(r"# ([\w-]+\.(?:ya?ml|py))\n")
    named = ((name.match(block.text), block.text) for block in of("yaml", "python", pages=[page]))
    return {found[1]: text for found, text in named if found}


def write_chat_model(folder: Path) -> None:
    """Write a tiny model with the chat template of ChatML."""
    chat_tokenizer = tokenizer("chatml")
    model = tiny_model("llama", vocab_size=len(chat_tokenizer), max_position_embeddings=256)
    model.save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Prepare the files of a reader of the pages: texts, the config of the first page, and a run."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "texts.jsonl").write_bytes(corpus.read_bytes())
    quick = configured(
        folder / "runs" / "quickstart",
        corpus,
        model__config={**TINY_MODEL, "max_position_embeddings": 256},  # README's run.yaml continues with it
        train__steps=200,  # the pages convert steps 100 and 200
        train__global_batch_size=1,
        data__eval_fraction=0,
        log__sample_tokens=0,
        checkpoint__every_steps=100,
        log__every_steps=50,
    )
    assert run_rank("cpu", quick) == 0
    write_chat_model(folder / README_MODEL)
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "library").mkdir()
    for letter in "astu":  # the pages read the runs s, t and u
        for module in sorted(Path(sysconfig.get_path("stdlib")).glob(f"{letter}*.py"))[:6]:
            shutil.copy(module, folder / "library")
    (folder / "run.yaml").write_text(files(FIRST_PAGE)["run.yaml"].replace(*UNSAID))
    (folder / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    accelerate = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
    (folder / "fsdp.yaml").write_text(yaml.safe_dump(accelerate))
    return folder


@pytest.fixture
def reader(prepared: Path, tmp_path: Path) -> Path:
    """Return a separate folder with the same files."""
    subprocess.run(["cp", "-r", f"{prepared}/.", str(tmp_path)], check=True)
    return tmp_path


def test_docs_command_blocks_have_comment() -> None:
    unmarked = [
        str(block)
        for block in of(*COMMANDS)
        if block.comment != "runs" and not re.match(r"needs: \S", block.comment)
    ]
    assert not unmarked


def pages_that_run() -> Iterator[Any]:
    for page in PAGES:
        run = [block.text for block in blocks(page) if block.comment == "runs"]
        if run:
            needs_xla = any("--backend xla" in text for text in run)
            yield pytest.param(page, id=page.stem, marks=pytest.mark.xla if needs_xla else [])


SMALLER = {
    "README": [
        ("epochs 8", "epochs 1 --log.sample_tokens 4"),
        ("epochs: 8", "epochs: 1"),
        ("every_steps: 4", "every_steps: 4\n  sample_tokens: 4"),
    ],
    "evaluate": [UNSAID, ("steps: 60", "steps: 20")],
    "index": [UNSAID],
    "optimizers": [("--config run.yaml", "--config run.yaml --train.steps 4")],
    "train": [
        ("num_hidden_layers: 32", "num_hidden_layers: 4"),
        ("steps: 60", "steps: 4"),
        ("--train.stop_after 30", "--train.stop_after 2"),
    ],
    "tutorial-chat": [("epochs: 8", "epochs: 1"), ("steps: 60", "steps: 4")],
    "tutorial-ranks": [("--nproc 8", "--nproc 4")],
}
"""Values of pages that are large only for the reader, and their replacements, by page."""


def smaller(page: Path, text: str) -> str:
    for shown, less in SMALLER.get(page.stem, ()):
        text = text.replace(shown, less)
    return text


def test_docs_contain_replaced_values() -> None:
    there = {page.stem: page.read_text("utf-8") for page in PAGES}
    assert all(shown in there[name] for name, pairs in SMALLER.items() for shown, _ in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("page", list(pages_that_run()))
def test_docs_commands_run(page: Path, reader: Path, zygote: Zygote) -> None:
    for name, text in files(page).items():
        (reader / name).write_text(smaller(page, text))
    environment = {
        **zygote.environment,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XDG_CACHE_HOME": str(reader / "cache"),
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": QUICK,
        LIBRARY: str(reader / "library"),
    }
    ran = 0
    for block in blocks(page):
        if block.comment != "runs":
            continue
        program = ["bash", "-euxc"] if block.language in COMMANDS else [zygote.folder / "python", "-c"]
        done = subprocess.run(
            [*program, smaller(page, block.text)],
            cwd=reader,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        ran += 1
    assert ran


def arguments(line: str) -> list[str] | None:
    """Return the arguments of ``portable-train`` in a line, or None if the line calls another program."""
    words = shlex.split(line, comments=True)
    at = next((i for i, word in enumerate(words) if word.rpartition("/")[2] in PROGRAMS), None)
    return None if at is None else words[at + 1 :]


def test_docs_flags_exist(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes commands that cannot be run here."""
    monkeypatch.chdir(reader)
    (reader / "configs").symlink_to(ROOT / "configs")
    for run in ("mine", "lora"):
        (reader / "runs" / run).mkdir()
        shutil.copy(reader / "run.yaml", reader / "runs" / run / "config.yaml")
    checked = 0
    for block in of(*COMMANDS):
        for name, text in {**files(FIRST_PAGE), **files(block.page)}.items():
            (reader / name).write_text(text)
        for line in block.text.replace("\\\n", " ").splitlines():
            found = arguments(line)
            if not found or found[0] in ("import", "init"):  # whose flags are others
                continue
            if "--help" not in found and not any("..." in word for word in found):
                parse_train_args(found)
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_docs_yaml_is_valid_config(block: Block, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    if block.comment:
        assert re.match(r"not a run's config: \S", block.comment), block.comment
    elif "distributed_type" in block.text:
        (reader / "given.yaml").write_text(block.text)
        parse_train_args(["--accelerate-config", "given.yaml"])
    else:
        (reader / "given.yaml").write_text(block.text)
        load_config(reader / "given.yaml")


# -- links -----------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site make from the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "config.md"], ids=lambda page: page.stem)
def test_docs_links_have_targets(page: Path) -> None:
    """Only links within the project are checked, because the network is not used."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


def test_docs_index_links_pages_by_title() -> None:
    """The first page links to every other, by its title."""
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    links = re.findall(r"\[([^\]]+)\]\((\w[\w-]*\.md)\)", text)
    assert {page for _, page in links} == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    titles = {page: (ROOT / "docs" / page).read_text("utf-8").split("\n", 1)[0] for _, page in links}
    assert [(name, page) for name, page in links if titles[page] != f"# {name}"] == []


def test_docs_name_existing_tests_and_modules() -> None:
    """``tests/test_docs.py``, and ``python -m benchmarks.zero`` and the like."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    tests = set(re.findall(r"`((?:tests/)[\w/]+\.py)`", text))
    assert len(tests) > 20 and not [name for name in tests if not (ROOT / name).is_file()]
    modules = set(re.findall(r"python -m ((?:benchmarks|gpu|tpu|portable)[\w.]*)", text))
    places = {name: ROOT / name.replace(".", "/") for name in modules}
    assert (
        modules
        and [
            name
            for name, at in places.items()
            if not at.with_suffix(".py").is_file() and not (at / "__main__.py").is_file()
        ]
        == []
    )


def test_docs_tour_lines_exist() -> None:
    """Each line that the tour quotes is in the function that it names."""
    rows = table_after(ROOT / "docs" / "tour.md", "## Find a line")[2:]
    assert len(rows) > 10
    for _, quoted, place in rows:
        function, _, link = place.partition(" in ")
        source = (ROOT / "docs" / link[link.index("(") + 1 : -1]).read_text("utf-8")
        class_name, _, name = function.strip("`").rpartition(".")
        nodes: list[ast.AST] = list(ast.walk(ast.parse(source)))
        if class_name:
            class_node = next(n for n in nodes if isinstance(n, ast.ClassDef) and n.name == class_name)
            nodes = list(class_node.body)
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        body = ast.get_source_segment(source, functions[name]) or ""
        assert quoted.strip("`").replace("\\|", "|") in body, f"{quoted} is not in {place}"


@pytest.mark.slow
def test_docs_site_builds_without_warnings(tmp_path: Path, zygote: Zygote) -> None:
    pytest.importorskip("myst_parser")
    command = ["python", "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "site")]
    built = zygote.run(*command)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert "portable-train" in page and 'href="moving.html"' in page
    api = (tmp_path / "site" / "api.html").read_text("utf-8")
    exported = [(portable, name) for name in portable.__all__]
    for package in (losses, converters):  # names that portable also exports are described there
        exported += [(package, name) for name in package.__all__ if name not in portable.__all__]
    assert [name for package, name in exported if f'id="{package.__name__}.{name}"' not in api] == []


CHOICES: dict[str, dict[str, Any]] = {
    "`memory.offload_optimizer: cpu`": {"memory.offload_optimizer": "cpu"},
    "`memory.offload_params: cpu`": {"memory.offload_params": "cpu"},
    "optimizers `adafactor`, `adamw_8bit`": {"train.optimizer": "adafactor"},
    "`memory.offload_activations`": {"memory.offload_activations": True},
    "`train.fused_backward`": {"train.fused_backward": True, "train.max_grad_norm": None},
    "`train.master_dtype: bf16`": {"train.master_dtype": "bf16"},
    "`compile: true`": {"compile": True, "compile_backend": "eager"},
    "`memory.activation_checkpointing`": {"memory.activation_checkpointing": "selective"},
    "`memory.offload_optimizer: nvme`": {"memory.offload_optimizer": "nvme", "memory.nvme_path": str(ROOT)},
}


def test_docs_exit_codes_match_commands() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    told = dict(re.findall(r"^\| (\d+\+?) \| (.*) \|$", page, re.MULTILINE))
    assert told == {f"{code}+" if code == BY_SIGNAL else str(code): text for code, text in EXIT_CODES.items()}


def test_docs_strategy_table_matches_backends() -> None:
    pytest.importorskip("deepspeed")
    head, _, *rows = table_after(ROOT / "docs" / "strategies.md", "### Features of each strategy")
    table = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    for name, settings in CHOICES.items():
        for strategy, said in table[name].items():
            refused = refusal({"strategy": strategy.strip("`"), **settings})
            allowed = refused is None or "libaio" in refused
            assert allowed == (said == "yes"), f"{name} with {strategy}: {said}, but: {refused or 'accepted'}"
    assert refusal({"strategy": "zero2", "train.optimizer": "adamw_8bit"})


def table_after(page: Path, mark: str) -> list[list[str]]:
    """Return the cells of the first table below ``mark``, by line, with the line of dashes."""
    lines = page.read_text("utf-8").partition(f"{mark}\n")[2].splitlines()
    below = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    table = itertools.takewhile(lambda line: line.startswith("|"), below)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def refusal(settings: dict[str, Any]) -> str | None:
    """Return why two CPU ranks reject ``settings``, or None if they accept them."""
    try:
        config = load_config(None, {"backend": "cpu", "precision": "bf16", **settings})
        resolve_run(config, "cpu", 2)
    except UserError as error:
        return str(error)
    return None
