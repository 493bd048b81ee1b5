"""The HTML report of a run: it contains the recorded values, and a real browser draws it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portable.errors import UserError
from portable.output.existing_run import DATA_SAMPLES_FILE
from portable.reporting.html_report import TARGET_NUM_POINTS, downsample_points, main
from portable.reporting.metrics import MetricsFile, read_events
from portable.run.rank import run_rank
from tests.runs import configured

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Train in two launches, the second with another strategy."""
    folder = tmp_path_factory.mktemp("report") / "moved"
    assert run_rank("cpu", configured(folder, corpus, train__stop_after=4, train__eval_every=4)) == 0
    second = configured(folder, corpus, train__eval_every=4, strategy="no_shard")
    assert run_rank("cpu", second) == 0
    return folder


def data_of(page: Path) -> Any:
    found = re.search(
        r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found
    return json.loads(found[1])


def invented(folder: Path, rows: list[dict[str, Any]], config: str = "data: {seq_len: 8}\n") -> Path:
    folder.mkdir()
    metrics = MetricsFile(folder, from_step=0)
    for row in rows:
        metrics.append_row(row)
    metrics.close()
    (folder / "config.yaml").write_text(config)
    return folder


def test_run_writes_events_and_report(run: Path) -> None:
    assert [(event["event"], event["step"]) for event in read_events(run)] == [
        ("start", 0), ("save", 4), ("end", 4), ("resume", 4), ("save", 8), ("end", 8),
    ]  # fmt: skip
    (told,) = data_of(run / "report.html")["runs"]
    assert [mark["kind"] for mark in told["events"]] == ["start", "save", "end", "move", "save", "end"]
    assert "no_shard" in told["events"][3]["text"] and "was cpu, full_shard, 1" in told["events"][3]["text"]
    assert [point[0] for point in told["series"]["loss"]] == list(range(1, 9))
    assert [point[1] for point in told["series"]["loss"]] == [6 * 32 * step for step in range(1, 9)]
    assert [point[0] for point in told["series"]["eval_loss"]] == [4, 8]
    page = (run / "report.html").read_text()  # which loads nothing from the network
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href|@import|url)\s*[=(]\s*["']?\s*(https?:)?//""", page)


def test_metrics_file_reads_only_the_end_of_a_long_log(tmp_path: Path) -> None:
    """A resume after 40,000 steps whose log has 1,000 later rows, one evaluation and a row cut by a crash."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "loss": 1.5, "note": "x" * 200} for step in range(1, 41_001)]
    rows.insert(40_000, {"step": 40_000, "eval_loss": 1.25})
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines) + lines[-1][:9])
    before = int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])
    metrics = MetricsFile(tmp_path, from_step=40_000)
    read = int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0]) - before
    metrics.append_row({"step": 40_001, "eval_loss": 1.0})
    metrics.append_row({"step": 40_002, "loss": 1.0, "eval_mine": 1.0})  # logged by a callback
    metrics.close()
    assert [metrics.has_evaluation(step) for step in (40_000, 40_001, 40_002)] == [True, True, False]
    appended = '{"step": 40001, "eval_loss": 1.0}\n{"step": 40002, "loss": 1.0, "eval_mine": 1.0}\n'
    assert path.read_text() == "".join(lines[:40_001]) + appended
    assert read < path.stat().st_size / 3, read


def test_report_compares_two_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": 2.0, "samples": 4, "grad_norm": float("inf")}
    other = invented(tmp_path / "other", [row])
    assert '"grad_norm": null' in (other / "metrics.jsonl").read_text()  # JSON has no infinity
    out = tmp_path / "both.html"
    assert main([str(run), str(other), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    data = data_of(out)
    assert [one["name"] for one in data["runs"]] == ["moved", "other"]
    assert ["data.seq_len", "32", "8"] in data["settings"]
    assert data["axes"] == ["step", "tokens"]  # the other kept no time


def test_downsample_points_keeps_spikes() -> None:
    points: list[Any] = [(step, None, None, step % 7 / 7) for step in range(300_001)]
    points[123_456] = (123_456, None, None, 50.0)
    kept = downsample_points(points)
    assert TARGET_NUM_POINTS / 2 < len(kept) <= TARGET_NUM_POINTS + 2
    assert points[123_456] in kept and kept[-1] == points[-1] and kept == sorted(kept)


def test_report_rejects_folder_that_is_not_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one line, and only files of the run are read."""
    (tmp_path / METRICS).write_bytes(ROW)
    page = tmp_path / "page.html"
    makes: dict[str, Callable[[Path], object]] = {
        "has no metrics.jsonl": lambda _: None,
        "no step has been logged yet": lambda path: path.write_text('{"step": 1, "lo'),
        "/metrics.jsonl: cannot be read (is not a regular file)": os.mkfifo,
        "a link points outside of": lambda path: path.symlink_to(tmp_path / METRICS),
        "/metrics.jsonl: cannot be read": Path.mkdir,
    }
    for number, (said, make) in enumerate(makes.items()):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        make(folder / METRICS)
        assert main([str(folder), "--out", str(page)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {folder}") and said in line and not page.exists()
    assert main([str(run), "--out", str(tmp_path / "missing" / "page.html")]) == 2
    assert capsys.readouterr().err.startswith("error: --out: ")


@pytest.mark.parametrize("name", ["config.yaml", "events.jsonl", "log.txt", DATA_SAMPLES_FILE])
def test_report_ignores_optional_file_that_links_outside(name: str, tmp_path: Path) -> None:
    folder = invented(tmp_path / "run", [{"step": 1, "loss": 2.0, "samples": 4}])
    (folder / name).unlink(missing_ok=True)
    (tmp_path / "outside").write_text('{"step": 1, "event": "secret", "time": 1, "secret": 1}\n')
    (folder / name).symlink_to(tmp_path / "outside")
    assert main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "secret" not in page
    assert ("config.yaml (a link to a file outside of the folder)" in page) == (name == "config.yaml")


ROW = b'{"step": 1, "loss": 2.5, "samples": 4, "time": 1700000000.0}\n'
METRICS, EVENTS, CONFIG = "metrics.jsonl", "events.jsonl", "config.yaml"
UNREADABLE = "config.yaml (not readable)"


def doubled(first: bytes, then: bytes) -> bytes:
    """Forty mappings or lists, each of which names the one before twice."""
    lines = [
        b"a%d: &a%d " % (i, i) + then.replace(b"@", b"*a%d, *a%d" % (i - 1, i - 1)) for i in range(1, 40)
    ]
    return b"a0: &a0 " + first + b"\n" + b"\n".join(lines) + b"\n"


# File, its content, and the message of the page.
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "a byte that is no text": (METRICS, ROW + b'{"step": 2, "no\xffte": 1}\n', "1 line of metrics"),
    "NaN and infinity": (METRICS, b'{"step": 2, "loss": NaN, "grad_norm": -Infinity}\n' + ROW, ""),
    "steps that are none": (
        METRICS,
        ROW + b'{"step": -1}\n{"step": true}\n{"step": 1e400}\n{"step": 9' + b"9" * 99 + b"}\n",
        "4 lines of metrics",
    ),
    "a number of 5000 digits": (METRICS, ROW + b'{"step": 2, "x": ' + b"9" * 5000 + b"}\n", "1 line of"),
    "nested": (METRICS, ROW + b'{"step": ' + b"[" * 100_000 + b"\n", "1 line of metrics"),
    "aliases": (CONFIG, doubled(b"[x, x]", b"[@]"), UNREADABLE),
    "merges": (CONFIG, doubled(b"{x: 1}", b"{<<: [@]}"), UNREADABLE),
    "a mapping in itself": (CONFIG, b"a: &a {b: *a}\n", UNREADABLE),
    "a number of 24,000 digits": (CONFIG, b"a: 0x" + b"f" * 20_000, UNREADABLE),
    "deep settings": (CONFIG, b"[" * 5000 + b"]" * 5000, "config.yaml (nested too deeply)"),
    "no text at all": (CONFIG, bytes(range(256)), UNREADABLE),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_report_skips_and_reports_damage(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    damaged, held, told = DAMAGED[name]
    for file, content in {METRICS: ROW, CONFIG: b"seed: 0\n", damaged: held}.items():
        (folder / file).write_bytes(content)
    started = time.process_time()
    assert main([str(folder)]) == 0
    assert time.process_time() - started < 3
    said = capsys.readouterr()
    assert said.out == f"{folder / 'report.html'}\n"
    assert said.err.count("\n") == bool(told) and told in said.err
    page = data_of(folder / "report.html")
    assert page["runs"][0]["facts"].get("unreadable", "") == said.err.partition("unreadable: ")[2].strip()
    assert len(page["metrics"]) < 80 and len((folder / "report.html").read_bytes()) < 1 << 20
    assert page["runs"][0]["facts"]["step"] in ("1", "2")


@pytest.mark.parametrize("name", ["<img src=x>", "__DATA__", "__TITLE__", "a\x1b[2Jb\nerror: no", "b\udcff"])
def test_report_escapes_names(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of folders, metrics and settings are plain text in the page and on the terminal."""
    evil = "</script><script>alert(1)</script>"
    row = {"step": 1, "loss": 1.0, evil: 2.0}
    folder = invented(tmp_path / name, [row], f"note: {json.dumps(evil)}\n")
    with (folder / METRICS).open("ab") as file:
        file.write(b"no row\n")
    assert main([str(folder)]) == 0
    said = capsys.readouterr()
    assert all(line.isprintable() for line in (*said.out.splitlines(), *said.err.splitlines()))
    assert not any(line.startswith("error") for line in said.err.splitlines())
    page = (folder / "report.html").read_text()
    assert evil not in page and "<img" not in page and "alert(1)" in page and page.count("</script>") == 2
    data = data_of(folder / "report.html")
    assert data["runs"][0]["name"] == name and ["note", evil] in data["settings"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_report_is_drawn_by_browser(run: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    quiet = ["--disable-gpu", "--no-first-run", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [CHROMIUM, "--headless", *quiet, "--enable-logging=stderr", "--virtual-time-budget=5000",
         "--window-size=1200,1000", "--dump-dom", (run / "report.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr, shown.stderr  # an exception of the script, or a blocked request
    charts = re.findall(r"<figure.*?</figure>", shown.stdout, re.DOTALL)
    titles = [re.search(r"<figcaption>([^<]*)", chart)[1] for chart in charts]  # type: ignore[index]
    assert titles[:4] == ["Loss", "Learning rate", "Gradient norm", "Throughput"]
    curves = re.findall(r'<path d="(M[^"]*)"', charts[0])
    assert len(re.findall(r"[ML]", curves[0])) == 8 and "NaN" not in curves[0]  # a point a step


LINKED = ["metrics.jsonl", "events.jsonl", "report.html", "log.txt", "config.yaml", ".config.yaml.partial"]


@pytest.mark.parametrize("name", [*LINKED, ".lock", "tensorboard"])
def test_run_does_not_write_through_link(
    tmp_path: Path, corpus: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that replaces a file of the run is rejected in one line, or replaced."""
    monkeypatch.chdir(tmp_path)
    folder, mine = Path("run"), tmp_path / "mine"
    folder.mkdir()
    mine.mkdir() if name == "tensorboard" else mine.write_text("mine")
    (folder / name).symlink_to(mine)
    settings = {"train__steps": 1, "data__eval_fraction": 0, "checkpoint__export": False}
    try:
        run_rank("cpu", configured(folder, corpus, **settings, log__trackers=["tensorboard"]))
    except UserError as error:
        assert name in str(error) and re.search("is a link|a link points outside of", str(error))
    else:
        assert not (folder / name).is_symlink()
    assert not any(mine.iterdir()) if name == "tensorboard" else mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("data:image/jpeg;base64,/9j/4AAQ", True),
        ("https://example.org/tracker.png", False),
        ("data:image/svg+xml;base64,PHN2Zz4=", False),
        (f"data:image/jpeg;base64,{'A' * 50_000}", False),
    ],
)
def test_report_shows_only_small_thumbnails(url: str, shown: bool, tmp_path: Path) -> None:
    folder = invented(tmp_path / "run", [{"step": 1, "loss": 2.0}])
    pieces = [["ask", False], ["[image 2x2, 4 tokens]", False, url], ["yes", True, ""]]
    sample = {"position": 0, "tokens": 9, "trained": 1, "pieces": pieces}
    preview = {"facts": {}, "lengths": [], "samples": [sample]}
    (folder / "data_samples.json").write_text(json.dumps(preview))
    assert main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    (run,) = data_of(tmp_path / "page.html")["runs"]
    expected = [["ask", False, ""], ["[image 2x2, 4 tokens]", False, url if shown else ""], ["yes", True, ""]]
    assert run["data"]["samples"][0]["pieces"] == expected
