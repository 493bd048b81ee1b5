"""Complete runs on one rank: their output files, and that they resume as if never stopped."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from portable.checkpoint.store import CheckpointStore
from portable.checkpoint.trainer_state import TrainerState
from portable.config import load_config
from portable.converters.formats.dcp.checksums import CHECKSUMS
from portable.converters.manifest import MANIFEST
from portable.errors import DamagedError, UserError
from portable.output.output_dir import lock_run_folder, open_output
from portable.reporting.html_report import write_report
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests import runs
from tests.ranks import RankPool
from tests.runs import configured, losses, weights

pytestmark = pytest.mark.usefixtures("brief_runs")


def leg(folder: Path, corpus: Path, **overrides: Any) -> int:
    return run_rank("cpu", configured(folder, corpus, **overrides))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Train an uninterrupted run of eight steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert leg(folder, corpus, train__eval_every=4) == 0
    return folder


def test_run_writes_documented_files(finished: Path) -> None:
    rows = read_metrics(finished)
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 9))
    needed = {"loss", "grad_norm", "learning_rate", "tokens_per_second", "data_wait", "memory", "samples"}
    assert all(needed <= row.keys() for row in logged)
    assert [row["samples"] for row in logged] == [6 * step for step in range(1, 9)]
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8]
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.3
    names = [
        folder.name for _, folder in CheckpointStore(finished / "checkpoints", keep=None).list_complete()
    ]
    assert names == ["step-000004", "step-000008"]
    state = json.loads((finished / "checkpoints" / "step-000008" / "trainer_state.json").read_text())
    assert (state["step"], state["samples"], state["format_version"]) == (8, 48, 2)
    assert load_config(finished / "config.yaml").train.steps == 8


def test_final_model_loads_and_computes_same_loss(finished: Path, tmp_path: Path) -> None:
    load: Any = AutoModelForCausalLM.from_pretrained
    model, info = load(finished / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokenizer = AutoTokenizer.from_pretrained(finished / "final")
    assert tokenizer.decode(tokenizer("the loss falls\n\tå")["input_ids"]) == "the loss falls\n\tå"
    # The expected values are read by torch's loader from the last checkpoint.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(finished / "checkpoints" / "step-000008", tmp_path / "all.pt")
    stored = torch.load(tmp_path / "all.pt", weights_only=False)["model"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
    assert model.config.use_cache  # as the config was given, not as training set it
    for kind in ("eos", "bos", "pad"):
        known = getattr(tokenizer, f"{kind}_token_id")
        assert known == getattr(model.config, f"{kind}_token_id")
        assert known == getattr(model.generation_config, f"{kind}_token_id")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_stopped_run_resumes_bit_for_bit(
    optimizer: str, finished: Path, tmp_path: Path, corpus: Path
) -> None:
    """SGD without momentum has no state, which a checkpoint must be able to represent."""
    whole, folder, settings = finished, tmp_path / "run", dict[str, Any]()
    if optimizer == "sgd":
        whole, settings = tmp_path / "whole", {"train__optimizer": "sgd", "train__betas": [0.0, 0.9]}
        leg(whole, corpus, **settings)
    assert leg(folder, corpus, train__stop_after=3, **settings) == 0
    assert not (folder / "final").exists()
    assert leg(folder, corpus, **settings) == 0
    assert losses(folder) == losses(whole)
    assert weights(folder) == weights(whole)


def test_damaged_newest_checkpoint_is_set_aside(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """A bit of a shard of rank 1 is flipped, which rank 0 does not notice. The run resumes bit for bit.

    For other strategies and world sizes, see `test_moves.py`.
    """
    whole, folder = tmp_path / "whole", tmp_path / "run"
    settings: dict[str, Any] = {"strategy": "full_shard", "train__micro_batch_size": 3}
    assert ranks.run(2, runs.leg, whole, corpus, settings) == 0
    shorter = settings | {"checkpoint__every_steps": 2, "train__stop_after": 5}
    assert ranks.run(2, runs.leg, folder, corpus, shorter) == 0
    shard = folder / "checkpoints" / "step-000005" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(bytes(content))
    assert ranks.run(2, runs.leg, folder, corpus, settings) == 0
    assert losses(folder) == losses(whole)
    assert weights(folder) == weights(whole)
    assert (folder / "checkpoints" / "step-000005.damaged").is_dir()
    config = json.loads((folder / "final" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def killed_while_saving(folder: Path, corpus: Path, moment: str) -> None:
    """Run a launch that is killed within its second save."""
    import portable.paths as module

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "shards":
        from portable.engines.fsdp.engine import TorchEngine

        write = TorchEngine.save_shards

        def save(self: TorchEngine, target: Path, *, background: bool) -> Any:
            handle = write(self, target, background=background)
            handle.wait()
            if "000008" in target.name:
                shard = next(target.glob("*.distcp"))
                os.truncate(shard, shard.stat().st_size // 2)
                die()
            return handle

        TorchEngine.save_shards = save  # type: ignore[method-assign, assignment]
    elif moment == "rename":
        sync = module.sync_folder

        def sync_folder(path: Path) -> None:
            sync(path)
            if "000008" in path.name:
                die()

        module.sync_folder = sync_folder
    leg(folder, corpus, train__steps=12)


@pytest.mark.parametrize("moment", ["shards", "rename"])
def test_run_killed_during_save_resumes(moment: str, tmp_path: Path, corpus: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    process = multiprocessing.get_context("forkserver").Process(
        target=killed_while_saving, args=(folder, corpus, moment)
    )
    process.start()
    assert leg(whole, corpus, train__steps=12) == 0
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == [".step-000008.partial", "step-000004"]
    assert leg(folder, corpus, train__steps=12) == 0
    assert losses(folder) == losses(whole)
    assert [row["step"] for row in read_metrics(folder) if "loss" in row] == list(range(1, 13))  # once each
    assert weights(folder) == weights(whole)
    assert not list((folder / "checkpoints").glob(".*"))


def test_checkpoint_keep_keeps_newest(tmp_path: Path, corpus: Path) -> None:
    leg(tmp_path, corpus, checkpoint__every_steps=1, checkpoint__keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000007", "step-000008"]


def test_remains_of_killed_export_are_removed(tmp_path: Path, corpus: Path, finished: Path) -> None:
    """The next run removes them only in its folder. A kill between two renames does not lose the model."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    model = (folder / "final" / "model.safetensors").read_bytes()
    (folder / "final").rename(folder / ".final.old-17-abcdef")
    for name in (".final.tmp-17-abcdef", ".final.tmp-18-abcdef", ".other.tmp-17-abcdef"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_text("half")
    with open_output(configured(folder, corpus)).lock_against_other_runs():
        assert (folder / "final" / "model.safetensors").read_bytes() == model
        assert [path.name for path in folder.glob(".*.*-*")] == [".other.tmp-17-abcdef"]
    shutil.copytree(folder / "final", folder / ".final.old-18-abcdef")
    with open_output(configured(folder, corpus)).lock_against_other_runs():
        assert [path.name for path in folder.glob(".*.*-*")] == [".other.tmp-17-abcdef"]


def test_run_evaluates_and_saves_by_epochs(tmp_path: Path, corpus: Path) -> None:
    """There are 144 training samples, 6 per step: an eighth of an epoch is 3 steps, a tenth is 2.4."""
    settings: dict[str, Any] = {"data__packing": False, "checkpoint__keep": None}
    settings |= {"checkpoint__every_epochs": 0.125, "train__eval_every_epochs": 0.1}
    settings |= {"checkpoint__every_steps": None}
    leg(tmp_path / "whole", corpus, **settings)
    names = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000006", "step-000008"]
    rows = read_metrics(tmp_path / "whole")
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 5, 8]
    by_epochs: dict[str, Any] = settings | {"train__steps": None, "train__epochs": 0.5}
    with pytest.raises(UserError, match=r"warmup_steps 13 exceeds train\.steps 12 \(train\.epochs 0\.5\)"):
        leg(tmp_path / "warm", corpus, **by_epochs, train__warmup_steps=13)


def test_resume_rejects_other_text_and_unusable_checkpoints(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    folder, source = tmp_path / "run", tmp_path / "text.jsonl"

    def refused(told: str, folder: Path = folder, **settings: Any) -> None:
        with pytest.raises(UserError, match=told):
            leg(folder, corpus, **{"data__source": str(source), **settings})

    source.write_text(corpus.read_text())
    folder.mkdir()
    with lock_run_folder(folder):
        refused("in use by another run")
    leg(folder, corpus, data__source=str(source), train__stop_after=2)
    source.write_text(corpus.read_text().replace("small", "large"))
    refused("the tokens, or the proportions of the sources, have changed")
    source.write_text(corpus.read_text())
    checkpoint = folder / "checkpoints" / "step-000002"
    shard = next(checkpoint.glob("*.distcp"))
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    refused(r"checkpoint.resume: .*distcp")
    shard.write_bytes(content)
    (checkpoint / "trainer_state.json").write_text("{")
    refused(r"trainer_state.json: (damaged|has 1 bytes)")
    other = tmp_path / "other"
    refused(
        r"final has no optimizer state; .* set model.name_or_path to",
        other,
        checkpoint__resume=f"{finished}/final",
    )
    changed = {"checkpoint__resume": str(finished), "train__optimizer": "sgd"}
    refused(r"train.optimizer is .adamw. in .*, but .sgd. in this run", other, **changed)
    assert not other.exists()


def test_damaged_logs_do_not_stop_run(
    finished: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000008")
    path = folder / "metrics.jsonl"
    good = path.read_bytes()
    bad = [b'{"step": 2, "loss": "\xff"}', b"[" * 100_000, b'{"step": true}', b"5"]
    nan = b'{"step": 3, "loss": NaN, "learning_rate": 1e-3}'
    path.write_bytes(good + b"\n".join([*bad, nan]) + b"\n")
    with (folder / "events.jsonl").open("ab") as events:
        events.write(b'{"event": "save", "step": 4}\n{"event": "save", "step": 4, "time": "noon"}\n\xff\n')
    assert leg(folder, corpus) == 0
    assert "metrics.jsonl: skipped 4 rows that cannot" in capsys.readouterr().err
    write_report([folder], folder / "report.html")
    assert losses(folder).keys() == losses(finished).keys()
    assert weights(folder) == weights(finished)


def _flip_in_samples(checkpoint: Path) -> None:
    path = checkpoint / "trainer_state.json"
    path.write_text(path.read_text().replace('"samples": 24', '"samples": 26'))


def _of_another_step(checkpoint: Path, *, whole: bool) -> None:
    """Copy the folder of another step, or only the files that describe its shards."""
    for path in checkpoint.with_name("step-000008").iterdir():
        if whole or path.name.endswith((".distcp", ".metadata")) or path.name == CHECKSUMS:
            (checkpoint / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_flip_in_samples, "trainer_state.json: is damaged or from another save"),
        (partial(_of_another_step, whole=False), "(from another save|were written)"),
        (
            partial(_of_another_step, whole=True),
            r"state.json: is damaged \(.*recorded step is 8, but the folder has the name step-\d+\)",
        ),
        (lambda folder: (folder / CHECKSUMS).unlink(), f"{CHECKSUMS}: is missing, although"),
        (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST}: is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), f"{MANIFEST}: is damaged"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json: has 2 bytes, "),
        (lambda folder: (folder / "config.json").unlink(), "config.json: is missing, although"),
    ],
    ids=["samples", "shards", "another step", "seal", "no manifest", "manifest", "tokenizer", "config"],
)
def test_verify_files_detects_damage_in_every_file(
    damage: Callable[[Path], object], told: str, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step-000004"
    for name in ("step-000004", "step-000008"):
        shutil.copytree(finished / "checkpoints" / name, tmp_path / name)
    assert TrainerState.read(folder).verify_files(folder) is None
    damage(folder)
    with pytest.raises(DamagedError, match=told):
        TrainerState.read(folder).verify_files(folder)
    whole = finished / "checkpoints" / "step-000004"
    with pytest.raises(DamagedError, match="belongs to another checkpoint"):
        dataclasses.replace(TrainerState.read(whole), run={}).verify_files(whole)


def test_resume_from_checkpoint_of_older_version_warns(
    finished: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished / "checkpoints" / "step-000004", folder / "checkpoints" / "step-000004")
    checkpoint = folder / "checkpoints" / "step-000004"
    (checkpoint / MANIFEST).unlink()
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "format_version": 1}))
    assert leg(folder, corpus) == 0
    assert "written by an older version of this program, without a manifest" in capsys.readouterr().err
    assert weights(folder) == weights(finished)
    (checkpoint / "trainer_state.json").write_text('{"format_version": 99}')
    with pytest.raises(UserError, match="this program supports versions up to"):
        TrainerState.read(checkpoint)


def test_resume_from_path_continues_in_new_folder(tmp_path: Path, corpus: Path, finished: Path) -> None:
    folder = tmp_path / "run"
    source = finished / "checkpoints" / "step-000004"
    assert leg(folder, corpus, checkpoint__resume=str(source), precision="auto") == 0
    assert load_config(folder / "config.yaml").precision == "fp32"
    assert losses(folder) == {step: loss for step, loss in losses(finished).items() if step > 4}
    assert weights(folder) == weights(finished)
    with pytest.raises(UserError, match="'never', but"):
        leg(folder, corpus, checkpoint__resume="never")
    older = folder / "checkpoints" / "step-000004"
    shutil.copytree(source, older, dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"step-000008 is newer than .*step-000004 in the same run"):
        leg(folder, corpus, checkpoint__resume=str(older))
