"""Complete runs whose output is in an object store: a real S3 server, real engines, and failures."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from portable.cli import main
from portable.converters.storage.object_store import RemotePath
from portable.errors import NOT_EXPORTED, RUN_ERROR, RunError, UserError
from portable.output import lease
from portable.output.lease import LEASE_FILE, Lease
from portable.output.publisher import Publisher
from portable.run.rank import run_rank
from portable.terminal import print_status
from tests.engines import ENGINES, Engines
from tests.object_store import ACCESS_KEY, LEAST_PART, SECRET_KEY, ObjectStore
from tests.ranks import RankPool, wait_for
from tests.runs import configured, flags, leg, losses, tiny, weights

EIGHT = "checkpoints/step-000008"


@pytest.fixture(autouse=True)
def quick_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waits short, and turn off garbage collection of all modules imported by tests, in this process."""
    monkeypatch.setattr("portable.converters.storage.object_store.FIRST_RETRY_WAIT", 0.01)
    monkeypatch.setattr("portable.run.train.freeze_existing_objects", nullcontext)


class Remote:
    """A run in the bucket.

    Attributes:
        url: URL of the run.
        store: Store with all objects of the bucket.
    """

    def __init__(self, store: ObjectStore, corpus: Path) -> None:
        self.store, self.corpus, self.url = store, corpus, store.url("run")

    def leg(self, **overrides: Any) -> int:
        return leg(self.url, self.corpus, overrides)

    def names(self, prefix: str = "") -> list[str]:
        return self.store.names(f"run/{prefix}")

    @property
    def steps(self) -> list[str]:
        """The names under ``checkpoints``, complete or not."""
        return sorted({name.split("/")[0] for name in self.names("checkpoints/")})

    def check_same(self, local: Path) -> None:
        """Check that the run equals an undisturbed run on the local disk."""
        assert self.store.get("run/final/model.safetensors") == weights(local)
        rows = [json.loads(line) for line in self.store.get("run/metrics.jsonl").splitlines()]
        assert {row["step"]: row["loss"] for row in rows if "loss" in row} == losses(local)


@pytest.fixture
def remote(s3: ObjectStore, corpus: Path) -> Remote:
    return Remote(s3, corpus)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Train a run of eight steps on this disk."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert leg(folder, corpus, {}) == 0
    return folder


def test_remote_run_resumes_despite_store_failures(
    remote: Remote, undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run is stopped, and continued on another machine, while requests fail now and then."""
    s3 = remote.store
    settings: dict[str, Any] = {
        "checkpoint__staging_dir": str(tmp_path / "staging"),
        "checkpoint__every_steps": 2,
        "checkpoint__keep": 2,
        "log__trackers": ["tensorboard"],
    }
    faults = [
        s3.fail(status=503, method="PUT", every=4),
        s3.fail(drop=True, method="GET", every=5),
        s3.fail(drop=True, after=True, method="POST", every=3),  # done, but the answer is lost
        s3.fail(cut=True, method="GET", key="distcp", every=7),
    ]
    assert remote.leg(train__stop_after=5, checkpoint__async=False, **settings) == 0
    assert remote.steps == ["step-000004", "step-000005"]
    assert not remote.names("final/")
    shutil.rmtree(tmp_path / "staging")
    assert remote.leg(**settings) == 0
    assert all(fault.done for fault in faults[:2])
    s3.heal()
    remote.check_same(undisturbed)
    assert remote.steps == ["step-000006", "step-000008"]
    found = s3.tree("run")
    assert {"config.yaml", "events.jsonl", "report.html", "final/tokenizer.json"} <= found.keys()
    assert len([name for name in found if name.startswith("tensorboard/")]) == 2
    assert f"{EIGHT}/_COMPLETE" in found and f"{EIGHT}/shard_checksums.json" in found
    for left_over in (LEASE_FILE, "probe", "_INCOMPLETE"):
        assert not [name for name in found if left_over in name]
    assert not s3.open_uploads() and not [*(tmp_path / "staging").rglob("*.*")]
    told = capfd.readouterr()
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert secret not in told.out + told.err
        assert not [name for name, data in found.items() if secret.encode() in data]


def test_remote_run_accepts_more_steps(remote: Remote) -> None:
    constant: dict[str, Any] = {"train__schedule": "constant", "train__warmup_steps": 0}
    assert remote.leg(**constant, train__steps=4) == 0
    assert remote.leg(**constant, train__steps=8) == 0
    with pytest.raises(UserError, match="add --allow-changes"):
        remote.leg(train__schedule="linear", train__steps=10)
    changed = {"train__schedule": "linear", "train__steps": 10, "checkpoint__allow_changes": True}
    assert remote.leg(**changed) == 0
    rows = [json.loads(line) for line in remote.store.get("run/metrics.jsonl").splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 11)]
    starts = [json.loads(line) for line in remote.store.get("run/events.jsonl").splitlines()]
    assert [event["changes"] for event in starts if event.get("changes")] == [
        "train.steps 4 → 8",
        "train.steps 8 → 10; train.schedule 'constant' → 'linear'",
    ]


def rank_leg(
    place: str, data: str, scratch: Path, environment: dict[str, str], settings: dict[str, Any]
) -> int:
    """Run a launch on a rank whose host shares no folder with the others."""
    host = scratch / f"host-{os.environ.get('RANK', '0')}"
    host.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        patched.chdir(host)
        config = configured(
            place,
            Path("elsewhere/corpus.jsonl"),
            data__source=data,
            data__cache_dir="cache",
            checkpoint__staging_dir="staging",
            **settings,
        )
        return run_rank(config.backend, config)


@pytest.mark.parametrize("name", ["full_shard", "xla"])
def test_remote_run_of_hosts_without_shared_disk(
    name: str, remote: Remote, tmp_path: Path, engines: Engines
) -> None:
    """The hosts read the same texts from the bucket, and each rank uploads its shards."""
    s3, settings = (
        remote.store,
        {**ENGINES[name].settings, "train__micro_batch_size": 1 if name != "xla" else 3},
    )
    assert engines.run(name, 2, leg, tmp_path / "whole", remote.corpus, settings) == 0
    s3.put("texts/corpus.jsonl", remote.corpus.read_bytes())
    there = (remote.url, s3.url("texts/*.jsonl"), tmp_path / "hosts", s3.environment)
    assert engines.run(name, 2, rank_leg, *there, settings | {"train__stop_after": 5}) == 0
    if name != "xla":
        of_ranks = [
            one for one in remote.names("checkpoints/step-000005/") if one.startswith(("__0_", "__1_"))
        ]
        assert len(of_ranks) >= 2
        assert all((tmp_path / "hosts" / f"host-{rank}" / "cache").is_dir() for rank in (0, 1))
    assert engines.run(name, 2, rank_leg, *there, settings) == 0
    remote.check_same(tmp_path / "whole")


def test_resume_from_url_fetches_only_own_shards(remote: Remote, tmp_path: Path, ranks: RankPool) -> None:
    """A folder was copied to the bucket, without markers. Each rank fetches only its shards."""
    s3, whole, settings = remote.store, tmp_path / "whole", {"train__micro_batch_size": 1}
    assert ranks.run(2, leg, whole, remote.corpus, settings) == 0
    s3.put_tree(whole / "checkpoints" / "step-000004", "copied")
    size = sum(len(data) for name, data in s3.tree("copied").items() if name.endswith(".distcp"))
    there = (remote.url, str(remote.corpus), tmp_path, s3.environment)
    assert ranks.run(2, rank_leg, *there, settings | {"checkpoint__resume": s3.url("copied")}) == 0
    assert s3.get("run/final/model.safetensors") == weights(whole)
    fetched = s3.bytes_out("copied/__")
    # Otherwise, each rank would read all of it. Small tensors are fetched in pieces that are larger than
    # needed.
    assert fetched < 1.5 * size, f"two ranks fetched {fetched} of {size} bytes"


@pytest.mark.usefixtures("brief_runs")
def test_remote_run_ends_if_store_stays_unavailable(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.01")
    remote.store.fail(drop=True, key="step-000008/__0")
    with pytest.raises(
        RunError, match=r"step-000008: could not be written .*last good.*s3://.*step-000004; "
    ):
        remote.leg(train__steps=12, checkpoint__max_outage_minutes=0)
    assert not remote.names(f"{LEASE_FILE}")
    assert not remote.names(f"{EIGHT}/_COMPLETE")
    remote.store.heal()
    assert remote.leg(train__steps=12, train__stop_after=4) == 0
    assert remote.steps == ["step-000004"], "what an interrupted save left is removed"


@pytest.mark.parametrize("moment", ["in between", "at the last save", "without a background"])
@pytest.mark.usefixtures("brief_runs")
def test_remote_run_survives_temporary_outage(
    moment: str,
    remote: Remote,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The steps continue, and the next save is complete. The last save waits for the store."""
    s3 = remote.store
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.002")
    monkeypatch.setattr("portable.checkpoint.store._RETRY_SECONDS", 0.2)
    monkeypatch.setattr("portable.converters.storage.object_store.PART_BYTES", LEAST_PART // 8)
    s3.least_part(1)
    settings: dict[str, Any] = {"checkpoint__every_steps": 2, "checkpoint__keep": None}
    settings["checkpoint__async"] = moment != "without a background"
    failed = "step-000008" if moment == "at the last save" else "step-000004"
    begun = s3.fail(delay=0.0, key=f"{failed}/_INCOMPLETE", method="PUT")
    forward, away, given_up = s3.forward, [0], threading.Event()

    def refuse(method: str, path: str, headers: Any, body: bytes) -> Any:
        """All requests from the second part of a shard on, until a save is given up."""
        hit = begun.done and "partNumber=2" in path and f"{failed}/__0" in path
        ours = "authorization" in {name.lower() for name in headers}
        if ours and (away[0] or hit) and not given_up.is_set():
            away[0] += 1
            return 503, [], b"<Error><Code>SlowDown</Code></Error>"
        return forward(method, path, headers, body)

    def say(text: str) -> None:
        print_status(text)
        if "could not be written" in text:
            given_up.set()

    monkeypatch.setattr(s3, "forward", refuse)
    monkeypatch.setattr("portable.checkpoint.store.print_status", say)
    assert remote.leg(**settings) == 0
    assert away[0]
    told = capfd.readouterr().err
    assert f"{failed}: could not be written" in told
    assert ("trying again" if failed == "step-000008" else "training continues, and the next save") in told
    remote.check_same(undisturbed)
    whole = [step for step in remote.steps if remote.names(f"checkpoints/{step}/_COMPLETE")]
    assert remote.steps == whole and "step-000008" in whole and "step-000002" in whole
    assert not s3.open_uploads() and not remote.names(f"{LEASE_FILE}")


def test_remote_run_skips_save_that_one_rank_cannot_write(
    remote: Remote, tmp_path: Path, ranks: RankPool
) -> None:
    """All ranks agree that this save has failed, and continue to the next one."""
    s3 = remote.store
    s3.fail(status=503, method="PUT", key="step-000004/__1")
    environment = s3.environment | {"PORTABLE_STORAGE_MINUTES": "0.005"}
    there = (remote.url, str(remote.corpus), tmp_path, environment)
    assert ranks.run(2, rank_leg, *there, {"train__micro_batch_size": 1}) == 0
    assert remote.steps == ["step-000008"] and remote.names(f"{EIGHT}/_COMPLETE")
    assert remote.names("final/model.safetensors") and not s3.open_uploads()


def child_leg(place: str, corpus: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    leg(place, corpus, {})


@pytest.mark.usefixtures("brief_runs")
def test_remote_run_killed_during_upload_resumes(
    remote: Remote, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    s3, context = remote.store, multiprocessing.get_context("forkserver")
    slow = s3.fail(delay=60, key=f"{EIGHT}/__0")
    process = context.Process(target=child_leg, args=(remote.url, remote.corpus, s3.environment))
    process.start()
    wait_for(lambda: slow.done or not process.is_alive())
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    s3.heal()
    assert remote.names(f"{LEASE_FILE}") and remote.names(f"{EIGHT}/_INCOMPLETE")
    capfd.readouterr()
    assert remote.leg() == 0  # at once: it can be seen that the holder of the lease is dead
    assert f"resuming at step 4 from {remote.url}/checkpoints/step-000004" in capfd.readouterr().err
    remote.check_same(undisturbed)
    assert not remote.names(f"{EIGHT}/_INCOMPLETE") and remote.names(f"{EIGHT}/_COMPLETE")


@pytest.mark.usefixtures("brief_runs")
def test_remote_checkpoint_is_set_aside_only_if_damaged(
    remote: Remote, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert remote.leg(checkpoint__every_steps=2, train__stop_after=6) == 0
    s3, name = remote.store, "run/checkpoints/step-000006/__0_0.distcp"
    with monkeypatch.context() as patched:
        patched.setenv("PORTABLE_STORAGE_MINUTES", "0.01")
        s3.fail(drop=True, method="GET", key="step-000006/__0")
        with pytest.raises(RunError, match=r"checkpoint.resume: .*step-000006"):
            remote.leg()
    s3.heal()
    assert remote.names("checkpoints/step-000006/_COMPLETE")
    content = bytearray(s3.get(name))
    content[len(content) // 3] ^= 1
    s3.put(name, bytes(content))
    assert remote.leg() == 0
    assert f"set aside as {remote.url}/checkpoints/step-000006/_DAMAGED" in capfd.readouterr().err
    assert s3.get(name) == content, "kept to look into"
    remote.check_same(undisturbed)


def read_errors(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on stderr that report an error or a traceback."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith(("error: ", "Trace"))]


@pytest.mark.usefixtures("brief_runs")
def test_outage_during_verification_leaves_newest_checkpoint(
    remote: Remote, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The store fails while the newest checkpoint is verified. The next launch resumes from it."""
    assert remote.leg(checkpoint__every_steps=2, train__stop_after=6) == 0
    before, newest = remote.names("checkpoints/"), f"{remote.url}/checkpoints/step-000006"
    capfd.readouterr()
    with monkeypatch.context() as patched:
        patched.setenv("PORTABLE_STORAGE_MINUTES", "0.002")
        # Only `TrainerState.verify_files` reads this file.
        outage = remote.store.fail(drop=True, method="GET", key="step-000006/published_names.json")
        for words, key in (
            (flags(tiny(remote.url, remote.corpus)), "checkpoint.resume"),
            (["--resume-info", remote.url], "--resume-info"),
        ):
            assert main(words) == RUN_ERROR
            (line,) = read_errors(capfd)
            assert line.startswith(f"error: {key}: {newest}/published_names.json: cannot read, because ")
            assert line.endswith("; run the command again") and "older checkpoint" not in line
    assert outage.done
    remote.store.heal()
    assert remote.names("checkpoints/") == before
    assert remote.leg() == 0
    assert f"resuming at step 6 from {newest}" in capfd.readouterr().err
    remote.check_same(undisturbed)


@pytest.mark.usefixtures("brief_runs")
def test_outage_during_evaluation_only_is_one_error_line(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert remote.leg(train__steps=2, checkpoint__export=False) == 0
    capfd.readouterr()
    with monkeypatch.context() as patched:
        patched.setenv("PORTABLE_STORAGE_MINUTES", "0.002")
        remote.store.fail(drop=True, method="PUT", key="evaluation.json")
        assert main([*flags(tiny(remote.url, remote.corpus, train__steps=2)), "--eval-only"]) == RUN_ERROR
    (line,) = read_errors(capfd)
    assert line.startswith(f"error: output_dir: {remote.url}/evaluation.json: cannot write, because ")


@pytest.mark.usefixtures("brief_runs")
def test_outage_during_export_ends_as_not_exported(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("PORTABLE_STORAGE_MINUTES", "0.002")
        remote.store.fail(drop=True, key="run/final/model")
        assert main(flags(tiny(remote.url, remote.corpus, train__steps=2))) == NOT_EXPORTED
    (line,) = read_errors(capfd)
    assert line.startswith(f"error: checkpoint.export: {remote.url}/final/")
    assert "training is complete, and only the export failed" in line
    remote.store.heal()
    assert remote.leg(train__steps=2) == 0
    assert remote.names("final/model.safetensors")


# -- refusals ------------------------------------------------------------------------------------------------

BAD_PLACES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no bucket": ({"output_dir": "s3://no-such-bucket/run"}, ["output_dir: s3://no-such", "no such bucket"]),
    "a password": (
        {"output_dir": "s3://me:secret@bucket/run"},
        ["output_dir", "credentials are not allowed"],
    ),
    "not to write to": ({}, ["output_dir: {url}/run", "access denied"]),
    "no source": ({"checkpoint.resume": "{url}/nothing"}, ["checkpoint.resume: s3://", "does not exist"]),
    "too small": ({}, ["checkpoint.staging_dir: ", "has 97.7 KiB free", "need about 650"]),
}


@pytest.mark.parametrize("name", BAD_PLACES)
def test_remote_output_with_bad_url_is_rejected(
    name: str,
    remote: Remote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is one line. A bucket without write permission is rejected before any work."""
    s3, (changed, words) = remote.store, BAD_PLACES[name]
    if name == "not to write to":
        s3.fail(status=403, method="PUT")
    if name == "too small":
        usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
        monkeypatch.setattr("portable.output.publisher.shutil.disk_usage", lambda _: usage)
    settings = tiny(remote.url, remote.corpus, data__cache_dir=str(tmp_path / "cache"))
    settings |= {key: value and value.replace("{url}", s3.url()) for key, value in changed.items()}
    assert main(flags(settings)) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error: ", "Trace"))]
    assert len(told) == 1 and all(word.replace("{url}", s3.url()) in told[0] for word in words), told
    assert "secret" not in told[0] and SECRET_KEY not in told[0]
    assert not remote.names() and (name != "not to write to" or not (tmp_path / "cache").exists())


# -- the lease -----------------------------------------------------------------------------------------------


@pytest.fixture
def place(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    """Return a place whose leases are renewed and become stale quickly."""
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.6)
    # Both holders are in this process, which must not count as dead.
    monkeypatch.setattr(lease, "_read_machine_identity", lambda: None)
    return RemotePath.from_url(remote.url)


def test_lease_of_running_run_is_respected(remote: Remote, place: RemotePath) -> None:
    """A lease that a user deletes is written again."""
    with Lease(place) as first:
        with pytest.raises(
            UserError, match=r"in use by another run .*; wait for that run, stop it, or choose"
        ):
            remote.leg()
        (place / LEASE_FILE).unlink()
        wait_for(lambda: remote.names() == [LEASE_FILE])
        first.check_not_taken()
        with pytest.raises(UserError, match="in use by another run"):
            Lease(place).__enter__()
    assert not remote.names()


def test_lease_that_is_not_renewed_is_taken_over(
    remote: Remote, place: RemotePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Lease, "_renew_until_ended", lambda _: None)
        first = Lease(place).__enter__()
    with Lease(place) as second:
        assert "has stopped writing to" in capsys.readouterr().err
        second.check_not_taken()
        with pytest.raises(RunError, match="another run has started to write"):
            first.check_not_taken()
        first.__exit__(None, None, None)
        second.check_not_taken()  # the former holder does not remove it
        assert remote.names() == [LEASE_FILE]
    first._taken_by = None  # as if it had been suspended until now
    with pytest.raises(RunError, match=r"\(a process that has ended\)"):
        first.check_not_taken()
    assert not remote.names()


def test_lease_is_taken_by_one_of_two_simultaneous_runs(
    remote: Remote, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that there is no lease before either writes one."""
    first, second = Lease(place), Lease(place)
    read = Lease._read_lease

    def read_before_the_first_begins(self: Lease) -> tuple[dict[str, Any], Any]:
        found = read(self)
        monkeypatch.setattr(Lease, "_read_lease", read)
        first.__enter__()
        return found

    monkeypatch.setattr(Lease, "_read_lease", read_before_the_first_begins)
    with pytest.raises(UserError, match="in use by another run"):
        second.__enter__()
    first.check_not_taken()
    first.__exit__(None, None, None)
    assert not remote.names()


def test_lease_without_conditional_writes_is_a_warning(
    remote: Remote, place: RemotePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = remote.store.forward

    def without(method: str, path: str, headers: Any, body: bytes) -> Any:
        plain = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        return forward(method, path, plain, body)

    monkeypatch.setattr(remote.store, "forward", without)
    with Lease(place) as held:
        time.sleep(0.3)
        held.check_not_taken()
        assert capsys.readouterr().err.count("does not support conditional writes") == 1
        with pytest.raises(UserError, match="in use by another run"):
            Lease(place).__enter__()
    assert not remote.names()


@pytest.mark.usefixtures("brief_runs")
def test_staging_folder_of_other_user_is_not_used(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of the folder for temporary files see the present names, but cannot predict later ones."""
    monkeypatch.setattr("portable.output.publisher.get_lasting_folder", lambda: tmp_path)
    first, second = (Publisher(RemotePath.from_url(remote.url), 0, None) for _ in range(2))
    assert first.work_folder != second.work_folder
    first.prepare_local_folders(lambda: 0)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    first.close()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "kept").touch()
    folder.symlink_to("theirs")
    assert remote.leg(train__steps=1) == 0
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["kept"]
