"""Tests of ``python -m tests.language``: rules on small examples, and the comparison with a baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.language.__main__ import BASELINE, check_language, list_findings, write_baseline
from tests.language.baseline import Baseline
from tests.language.changes import parse_diff
from tests.language.findings import Finding
from tests.language.marks import MARKS, tally_marks
from tests.language.measures import Figure
from tests.language.names import begins_with_verb, is_participle, tally_function_names, tally_locals
from tests.language.parameters import is_clause, tally_descriptions
from tests.language.prose import iter_passages
from tests.language.sources import Nodes, SourceError, find_error_callables, parse_source

EXAMPLES = {
    "opener": ("What decides the tokens.", "Cache key of the tokenizer settings."),
    "page-opener": ("Sort them. What sends the fewest bytes comes first.", "Sort them. What is a shard?"),
    "inner-opener": ("Return the rank. What is left is padding.", "Return the rank. The rest is padding."),
    "what-clause": (
        "Return what the loss needs.",
        "Print what to do next, and what happens if a rank fails.",
    ),
    "those-of": ("Compare the rows with those of the base.", "Compare the rows with the rows of the base."),
    "one-that": ("Use one that fits.", "Use the only one that fits."),
    "of-which": ("Read the files, of which some are empty.", "Read the files, each of which has a header."),
    "theirs": ("Convert a layout of ours.", "Convert our layout."),
    "own": ("Start a process of its own.", "Start a separate process."),
    "users": ("Call a loss of the user's.", "Call the code of the user's loss."),
    "is-no": ("The path is no regular file.", "There is no file, or it is no longer a file."),
    "alone": ("Only rank 0 alone writes.", "Leave it alone: the size alone does not identify a file."),
    "where": ("Return None where no step follows.", "Create the folder where the run writes."),
    "whole": ("Read the whole file.", "The size is a whole number."),
    "say": ("The header says that the file is complete.", "You may say that the file is complete."),
    "tell": ("The index tells the offset.", "The users tell you the offset."),
    "know": ("Keep the keys that DeepSpeed knows.", "Keep the keys that the reader knows."),
    "ask": ("Return the rows that a caller asked for.", "Ask the user for the rows."),
    "want": ("Return the dtype that the kernel wants.", "Set the dtype if you want to."),
    "learn": ("Other ranks learn of the failure.", "The model learns the labels."),
    "look": ("The loader looks at the first row.", "The row looks like JSON."),
    "come-to": ("Return the sum that the rows come to.", "The run comes to an end."),
    "go-on": ("The run goes on after a save.", "The run continues after a save."),
    "lie": ("The shards lie in one folder.", "The values lie in [0, 1]."),
    "stand": ("The code stands for a value.", "Replace the module by a stand-in."),
    "beside": ("Write a marker beside the file.", "Write a marker next to the file."),
    "alike": ("Treat both alike.", "Treat both the same way."),
    "meanwhile": ("Pause the watchdog meanwhile.", "Pause the watchdog during a save."),
    "whatever": ("Raise whatever torch raises.", "Raise the error of torch."),
    "as-far-as": ("Convert as far as possible.", "Convert all supported keys."),
    "as-long-as": ("Wait as long as the lock exists.", "Wait while the lock exists."),
    "so-many": ("The machine has not so many devices.", "Start as many ranks as devices."),
    "in-its-place": ("Use the average in its place.", "Use the average instead."),
    "somebody": ("Fail if somebody removed the file.", "Fail if the user removed the file."),
    "anew": ("Create the cache anew.", "Create the cache again."),
    "elided-per": ("Compile a graph a kind.", "Compile one graph per layer type, one at a time."),
    "for-messages": ("Name of the tensor, for messages.", "Name of the tensor, used in error messages."),
    "british": ("Initialise the colour.", "Initialize the color, and print two analyses of it."),
    "spelling": ("Fine tune on a data set.", "Fine-tune on a dataset."),
}
"""Prose with and without each mark."""


def find_marks(path: str, text: str) -> list[Finding]:
    """Find the marks in the content of a file."""
    source = parse_source(path, "portable", text)
    return tally_marks(path, iter_passages(source, find_error_callables([source]))).findings


def parse_nodes(code: str) -> Nodes:
    nodes = parse_source("a.py", "portable", code).nodes
    assert nodes
    return nodes


def test_marks_have_examples() -> None:
    assert list(EXAMPLES) == [mark.name for mark in MARKS]


@pytest.mark.parametrize("name", EXAMPLES)
def test_marks_match_only_bad_examples(name: str) -> None:
    bad, good = EXAMPLES[name]
    path = "a.md" if name == "page-opener" else "a.py"
    bad_text, good_text = (text if path == "a.md" else f'"""{text}"""' for text in (bad, good))
    assert name in {finding.kind for finding in find_marks(path, bad_text)}
    assert find_marks(path, good_text) == []


@pytest.mark.parametrize(
    ("path", "text", "marks"),
    [
        ("a.py", '"""Return the whole file."""', 1),
        ("a.py", 'SIZE = 1\n"""Size of the whole file."""', 1),
        ("a.py", "x = 1  # of the whole file", 1),
        ("a.py", "# of the\n# whole file", 1),
        ("a.py", 'raise ValueError(f"{path}: the whole file")', 1),
        ("a.py", 'class FormatError(ValueError): pass\nFormatError("the whole file")', 1),
        ("a.py", 'def refuse() -> ValueError: ...\nrefuse("the whole file")', 1),
        ("a.py", 'require(size, "of the whole" + " file")', 1),
        ("a.py", 'print("the whole file")', 0),
        ("a.py", '"""Read `whole` and ``the whole file``."""', 0),
        ("a.py", '"""Example::\n\n    the whole file\n"""', 0),
        ("a.py", "x = 1  # noqa: E731", 0),
        ("a.py", 'x = "# the whole file"', 0),
        ("a.md", "The whole file.", 1),
        ("a.md", "| name | the whole file |", 1),
        ("a.md", "See `whole` on [a page](whole.md).", 0),
        ("a.md", "```sh\nread whole file\n```", 0),
        ("a.md", "```sh\nread file  # the whole file\n```", 1),
        ("a.md", "<!-- needs: the whole file -->", 0),
    ],
)
def test_marks_match_only_prose(path: str, text: str, marks: int) -> None:
    assert len(find_marks(path, text)) == marks


def test_mark_has_line_and_excerpt() -> None:
    (finding,) = find_marks("a.py", 'def f():\n    """Read.\n\n    Reads the whole\n    file.\n    """\n')
    assert (finding.path, finding.line, finding.last_line) == ("a.py", 4, 4)
    assert finding.text == "...Read. Reads the [whole] file. ..."


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("of the run.", True),
        ("in bytes", True),
        ("that it is a callback of.", True),
        ("which rests during a save.", True),
        ("what to write.", True),
        ("how many.", True),
        ("takes one batch.", True),
        ("wraps the model.", True),
        ("called with each line.", True),
        ("is changed.", True),
        ("With its adapter.", True),
        ("The run that owns this callback.", False),
        ("size in bytes", False),
        ("Whether to overwrite files.", False),
        ("Number of steps.", False),
        ("How many samples to load.", False),
        ("For conversations, the token that ends an answer.", False),
        ("bytes the rank sends", False),
        ("`None` for all files.", False),
    ],
)
def test_is_clause_of_descriptions(description: str, expected: bool) -> None:
    assert is_clause(description) is expected


def test_tally_descriptions_reads_sections() -> None:
    docstring = """Read a file.

    Args:
        size: in bytes
        path (str): Path of the file, which
            may not exist.
        **options: of the reader.

    Returns:
        rows: of the file
    """
    tally = tally_descriptions("a.py", parse_nodes(f"def f():\n    {docstring!r}"))
    assert [finding.text for finding in tally.findings] == ["size: in bytes", "**options: of the reader."]
    assert tally.examined == 3


@pytest.mark.parametrize(
    "name",
    [
        *("build_model", "_read", "step", "sample_tokens", "all_reduce", "maybe_convert", "handleError"),
        *("is_complete", "needs_padding", "to_numpy", "from_config"),
    ],
)
def test_begins_with_verb_accepts_verbs(name: str) -> None:
    assert begins_with_verb(name)


@pytest.mark.parametrize(
    "name", ["rows", "kind_of", "run_of", "sample_size", "of_environment", "_told", "new_model"]
)
def test_begins_with_verb_rejects_nouns(name: str) -> None:
    assert not begins_with_verb(name)


def test_is_participle_of_names() -> None:
    assert all(map(is_participle, ("held", "_told", "opened", "opening")))
    assert not any(map(is_participle, ("read", "split", "padding", "opened_files", "embed")))


def test_tally_function_names_skips_prescribed_names() -> None:
    code = """
class Reader:
    def __len__(self): ...
    def state_dict(self): ...
    def on_step(self): ...
    @property
    def size(self): ...
    def rows(self): ...
@pytest.fixture
def corpus(): ...
def test_rows(): ...
def main(): ...
def held(): ...
def read(): ...
"""
    nouns, participles = tally_function_names("a.py", parse_nodes(code))
    assert [finding.text for finding in sorted(nouns.findings)] == ["def rows", "def held"]
    assert [finding.text for finding in participles.findings] == ["def held"]
    assert nouns.examined == participles.examined == 3


def test_tally_locals_counts_bindings() -> None:
    code = """
found = 1
class Row:
    kept = 1
def read(given, *, known):
    found = 2
    found += 1
    for at, name in []: ...
    with open(name) as held: ...
    try: ...
    except OSError as told: ...
    if made := 1: ...
    return [one for one in name], given
"""
    findings = sorted(tally_locals("a.py", parse_nodes(code)).findings)
    assert [finding.text for finding in findings] == ["found", "at", "held", "told", "made", "one"]


@pytest.mark.parametrize(
    ("now", "before", "is_worse"),
    [
        (Figure(3), Figure(2), True),
        (Figure(2), Figure(2), False),
        (Figure(3, 30.0), Figure(2, 20.0), True),
        (Figure(2, 30.0), Figure(2, 20.0), False),  # good prose was removed
        (Figure(3, 10.0), Figure(2, 20.0), False),  # good prose was added
    ],
)
def test_figure_is_worse_than_needs_higher_count_and_rate(
    now: Figure, before: Figure, is_worse: bool
) -> None:
    assert now.is_worse_than(before) is is_worse


MODULE = '''\
"""Reader of files."""


def read_rows(path):
    """Read the rows of a file."""
    found = 1
    return found
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Write a project with a baseline."""
    for folder in ("portable", "tests/language"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "portable" / "a.py").write_text(MODULE)
    (tmp_path / "portable" / "b.py").write_text(MODULE.replace("found", "rows"))
    (tmp_path / "portable" / "__init__.py").write_text('"""Product."""\n')
    assert write_baseline(tmp_path) == 0
    return tmp_path


BAD_FUNCTION = '''

def skipped(count):
    """Skip the whole batch.

    Args:
        count: of rows.
    """
    one = 1
'''
ERRORS = (
    "portable/a.py:11: ...Skip the [whole] batch. Args: count: of rows. ...  (whole: write 'complete'",
    "portable/a.py:14: count: of rows.  (clause: write a noun phrase",
    "portable/a.py:10: def skipped  (noun: begin the name with a verb",
    "portable/a.py:10: def skipped  (participle: name the function by a verb",
    "portable/a.py:16: one  (local one: name the variable by its content",
)


def test_language_check_and_write_reject_rise(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (project / BASELINE).read_text()
    (project / "portable" / "a.py").write_text(MODULE + BAD_FUNCTION)
    for run in (check_language, write_baseline):
        capsys.readouterr()
        assert run(project) == 1
        output = capsys.readouterr().out
        assert [error for error in ERRORS if error not in output] == []
    assert (project / BASELINE).read_text() == before


def test_language_write_stores_fall(project: Path) -> None:
    assert Baseline.load(project / BASELINE).figures["portable"]["locals"] == Figure(1)
    module = project / "portable" / "a.py"
    module.write_text(module.read_text().replace("found", "rows"))
    assert check_language(project) == 0
    assert write_baseline(project) == 0
    assert Baseline.load(project / BASELINE).figures["portable"]["locals"] == Figure(0)


def test_language_check_rejects_vague_local_in_new_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = project / "portable" / "a.py"
    (project / "portable" / "c.py").write_text(module.read_text())
    module.write_text(module.read_text().replace("found", "rows"))
    capsys.readouterr()
    assert check_language(project) == 1
    assert "portable/c.py:6: found  (local found" in capsys.readouterr().out
    assert write_baseline(project) == 0  # The figure of the package did not rise, as after moving a file.
    assert check_language(project) == 0


def test_parse_diff_reads_changed_lines_and_renames() -> None:
    diff = """\
diff --git a/old.py b/new.py
rename from old.py
rename to new.py
--- a/old.py
+++ b/new.py
@@ -3 +3,2 @@ def read():
-    return 1
+    x = 1
+    return x
@@ -9,2 +10,0 @@
-    a = 1
-    b = 1
"""
    changes = parse_diff(diff)
    assert changes.get_previous_path("new.py") == "old.py"
    assert changes.lines["new.py"] == {3, 4}
    on_line = [Finding("new.py", line, line + 1, "whole", "", "") for line in (1, 2, 4, 5)]
    assert [finding.line for finding in changes.select_changed(on_line)] == [2, 4]


def test_list_findings_prints_kind_and_path(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    list_findings(project, "locals", ["portable/a.py"])
    list_findings(project, "locals", ["portable/b.py"])
    assert capsys.readouterr().out.count("local found") == 1


def test_language_check_names_file_with_syntax_error(project: Path) -> None:
    (project / "portable" / "c.py").write_text("def\n")
    with pytest.raises(SourceError, match=r"portable/c\.py: cannot be read or parsed"):
        check_language(project)
