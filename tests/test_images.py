"""Images in conversations: tokens and losses of transformers and TRL, files, errors, engines and exports."""

from __future__ import annotations

import base64
import copy
import csv
import http.client
import io
import itertools
import json
import os
import shutil
import signal
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("torchvision")

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.image_utils import load_image

from portable.batch import IGNORED_LABEL
from portable.cli import main
from portable.commands.recipe import estimate_dataset_size
from portable.config import RunConfig
from portable.converters.cli import main as convert
from portable.data import images
from portable.data.dataset import RunData, build_data
from portable.data.images import decode_image
from portable.data.samples.order import EpochIndex
from portable.data.sources.records import CollectedErrors
from portable.data.sources.source_kinds import resolve_images
from portable.data.tokens import tokenize as tokenizing
from portable.data.tokens.cache import CacheDamagedError, TokenCache
from portable.errors import MultipleMistakesError, RunError, UserError
from portable.planner.run_time import estimate_training_work
from portable.run.rank import run_rank
from tests.engines import ENGINES, Engines
from tests.image_models import OTHER_PROCESSORS, PROCESSORS, make_image, write_image_model, write_squares
from tests.parity import launched, numbers_of, opened
from tests.portable.chat_support import tokenizer
from tests.portable.data_support import Settings, kill_build, write_jsonl
from tests.ranks import RankError, wait_for
from tests.runs import TINY_MODEL, configured, flags, losses, weights

Talk = list[dict[str, Any]]
FAMILIES = list(PROCESSORS)
ROWS = yaml.safe_load(Path(__file__).with_name("image_rows.yaml").read_text("utf-8"))
SIZES = {"a.png": (16, 16), "b.png": (24, 16), "c.png": (40, 12), "d.png": (9, 31), "e.png": (50, 30)}


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "path": name}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
TALKS: list[Talk] = [
    [user(image("a.png"), text("What?")), answer("A cat.")],
    [
        SYSTEM,
        user(image("b.png"), text("and"), image("c.png"), text("?")),
        answer("Two."),
        user(text("And "), image("d.png")),
        answer("A tall one."),
    ],
    [{"role": "user", "content": "Hi"}, answer("Hello")],
    [user(text("Describe "), image("e.png"), text(" please")), answer("Wide")],
    [
        user(text("Hi")),
        answer("Hello"),
        user(image("a.png"), image("b.png"), image("e.png")),
        answer("Three"),
    ],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the tiny checkpoint of a family once."""
    return cache(lambda family: write_image_model(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def qwen(model: Callable[[str], Path]) -> Path:
    return model("qwen2_5_vl")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of images of different sizes."""
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        pixels = generator.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("squares"), sizes=tuple(SIZES.values()))


def build(model: Path, source: Path | str | tuple[str, ...], cache_folder: Path, **settings: Any) -> RunData:
    """Build the data of a run on images."""
    given_settings = {
        "source": source if isinstance(source, tuple) else str(source),
        "images": True,
        "vocab_size": None,
        "packing": False,
        "seq_len": 256,
        "eval_fraction": 0.0,
        "cache_dir": cache_folder,
    }
    return build_data(Settings(**{**given_settings, **settings}), model_tokenizer=str(model))


def read_cache(data: RunData) -> TokenCache:
    return data.first_tokens


def load_images(talk: Talk, folder: Path) -> tuple[Talk, list[Any]]:
    """Return a conversation without paths, and its images."""
    talk, images = copy.deepcopy(talk), []
    for message in talk:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image":
                images.append(load_image(str(folder / part.pop("path"))))
    return talk, images


def to_parts(talk: Talk) -> Talk:
    return [
        {**message, "content": [text(content)] if isinstance(content := message["content"], str) else content}
        for message in talk
    ]


# -- tokens and labels --------------------------------------------------------------------------------------

TEMPLATES = {
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_5": "qwen3_5_nothink",
    "gemma3": "gemma3",
    "smolvlm": "smolvlm",
    "idefics3": "idefics3",
}
"""Published template of each family that TRL has, with a version that marks the answers."""


def write_processor(folder: Path, family: str, template: str | None) -> Any:
    """Write the tiny processor of a family, with its own template or a published one. Returns it."""
    import trl

    processor = PROCESSORS[family]()
    if template is not None:
        path = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
        processor.tokenizer.chat_template = path.read_text("utf-8")
    processor.chat_template = processor.tokenizer.chat_template
    processor.save_pretrained(folder)
    return AutoProcessor.from_pretrained(folder)


MODES = [
    *[(family, None, "all") for family in FAMILIES],
    *[(family, template, "completion") for family, template in [*TEMPLATES.items(), ("mistral3", None)]],
    *[(family, f"{template}_training", "assistant") for family, template in TEMPLATES.items()],
]


@pytest.mark.parametrize(("family", "template", "train_on"), MODES)
def test_tokens_and_labels_match_processor_and_trl(
    family: str, template: str | None, train_on: str, pictures: Path, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    processor = write_processor(tmp_path / "model", family, template)
    is_prompted = train_on == "completion"
    rows = [
        {"prompt": talk[:-1], "completion": talk[-1:]} if is_prompted else {"messages": talk}
        for talk in TALKS
    ]
    source = write_jsonl(tmp_path / "talks.jsonl", rows)
    data = build(tmp_path / "model", source, tmp_path, image_root=str(pictures), train_on=train_on)
    collate = DataCollatorForVisionLanguageModeling(
        processor, completion_only_loss=is_prompted, assistant_only_loss=train_on == "assistant"
    )
    tokens = read_cache(data)
    assert len(data.train) == len(TALKS)
    for index in range(len(TALKS)):
        number = data.train.list_document_numbers(index)[0]
        talk, images = load_images(TALKS[number], pictures)
        ids = tokens.read_document("text", number).astype(np.int64)
        # The processor: tokens and tensors.
        rendered = processor.apply_chat_template(to_parts(talk), tokenize=False)
        expected = processor(text=[rendered], images=[images] if images else None, return_tensors="np")
        batch = {
            name: tensor.numpy() for name, tensor in data.train.build_batch([EpochIndex(0, index)]).items()
        }
        assert expected.pop("input_ids")[0].tolist() == ids.tolist()
        assert expected.pop("attention_mask").all()
        for name, values in expected.items():
            actual = batch[name]
            if name.endswith("token_type_ids"):  # the last token is only a label
                values, actual = values[:, :-1], actual[:, : len(ids) - 1]
            np.testing.assert_array_equal(values, actual, name)
        blank = {name for name in batch if name.startswith("blank_")}
        assert bool(blank) == (not images)
        assert batch.keys() - {"input_ids", "attention_mask", "labels"} - blank <= {
            *expected,
            "token_type_ids",
            "mm_token_type_ids",
        }
        # TRL: labels. The only difference is that TRL trains the tokens of images if it trains the prompt.
        example = {"prompt": talk[:-1], "completion": talk[-1:]} if is_prompted else {"messages": talk}
        if train_on != "completion":  # otherwise TRL inserts the images a second time
            example = {"messages": to_parts(talk)}
        theirs = collate([{**example, "images": images}])
        assert theirs["input_ids"][0].tolist() == ids.tolist()
        labels = theirs["labels"][0].numpy().copy()
        for placed in tokens.list_images(number):
            span = slice(placed.first_token, placed.first_token + placed.num_tokens)
            if train_on == "all":
                assert (labels[span] == ids[span]).all()
            labels[span] = IGNORED_LABEL
        assert batch["labels"][0, : len(ids) - 1].tolist() == labels[1:].tolist()
        assert (labels != IGNORED_LABEL).any()


@pytest.mark.parametrize("template", ["qwen3_5_nothink", "qwen3_5_think"])
def test_separate_answers_have_images_of_their_turns(template: str, pictures: Path, tmp_path: Path) -> None:
    """These templates write earlier answers differently, so each answer is a sample."""
    pytest.importorskip("trl")
    processor = write_processor(tmp_path / "model", "qwen3_5", template)
    source = write_jsonl(tmp_path / "talks.jsonl", [{"messages": TALKS[1]}])
    data = build(tmp_path / "model", source, tmp_path, image_root=str(pictures))
    assert len(data.train) == 2
    for index in range(2):
        number = data.train.list_document_numbers(index)[0]
        talk, images = load_images(TALKS[1][: 3 + 2 * number], pictures)
        rendered = processor.apply_chat_template(to_parts(talk), tokenize=False)
        expected = processor(text=[rendered], images=[images], return_tensors="np")
        batch = data.train.build_batch([EpochIndex(0, index)])
        assert read_cache(data).read_document("text", number).tolist() == expected["input_ids"][0].tolist()
        for name in ("pixel_values", "image_grid_thw"):
            np.testing.assert_array_equal(batch[name].numpy(), expected[name])


# -- losses and gradients -----------------------------------------------------------------------------------


def image_run(folder: Path, source: Path, data: Path, **settings: Any) -> RunConfig:
    """Return the config of a short run that trains all parameters on images."""
    given_settings = {
        "model__config": None,
        "model__name_or_path": str(source),
        "data__seq_len": 160,
        "data__packing": False,
        "data__eval_fraction": 0.0,
        "train__steps": 2,
        "train__global_batch_size": 4,
        "train__micro_batch_size": 2,
        "train__trainable": ["."],
        "train__dropout": False,
        "checkpoint__every_steps": None,
        "checkpoint__export": False,
        "log__sample_tokens": 0,
    }
    return configured(folder, data, **{**given_settings, **settings})


OTHER_FAMILIES = [name for name in OTHER_PROCESSORS if name not in ROWS["other families"]]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_loss_and_gradients_match_transformers(
    family: str, model: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    rows = [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALKS[:4]]
    source = write_jsonl(tmp_path / "talks.jsonl", rows)
    settings = {"data__image_root": str(pictures), "data__seq_len": 512, "strategy": "no_shard"}
    config = image_run(tmp_path / "run", model(family), source, **settings)
    with opened(config) as trial:
        batches = [next(trial.batches) for _ in range(2)]
        valid = trial.backend.sum_host_numbers(sum(map(trial.engine.objective.compute_weight, batches)))
        sums = [
            trial.engine.accumulate_gradients(batch, valid, is_last_micro_batch=index == 1)
            for index, batch in enumerate(batches)
        ]
        ours = {name: parameter.grad for name, parameter in trial.engine.model.named_parameters()}
        loss = float(sum(share.values[0] for share in sums).detach())
    examples = []
    for talk in TALKS[:4]:
        parts, images = load_images(talk, pictures)
        examples.append({"prompt": parts[:-1], "completion": parts[-1:], "images": images})
    processor = AutoProcessor.from_pretrained(model(family))
    batch = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)(examples)
    plain = AutoModelForImageTextToText.from_pretrained(model(family), dtype=torch.float32).train()
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in theirs.values() if gradient is not None)
    assert ours.keys() == theirs.keys()
    # Gradients of the embeddings of Gemma 4 are sums of large terms in another order.
    tolerance = 1e-5 if family == "gemma4" else 1e-6
    for name, gradient in theirs.items():
        if gradient is None:  # a run also computes gradients of parameters that are not used, which are zero
            assert ours[name] is None or not ours[name].any()
        else:
            assert float((ours[name] - gradient).abs().max()) <= tolerance * largest, name
    assert any("vis" in name and gradient is not None and gradient.any() for name, gradient in theirs.items())


@pytest.mark.parametrize("family", ROWS["other families"])
def test_families_with_other_numbers_of_features_are_rejected(
    family: str, model: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "talks.jsonl", [{"messages": TALKS[0]}])
    config = image_run(tmp_path / "run", model(family), source, data__image_root=str(pictures))
    with pytest.raises(UserError) as refused, opened(config):
        pass
    assert str(refused.value) == ROWS["other families"][family].format(model=model(family))


# -- ranks --------------------------------------------------------------------------------------------------

RANKED = [name for name in ENGINES if not name.startswith(("xla", "tpu")) and "shared" not in name]
RANK_CASES = [
    *[(name, "qwen3_vl") for name in RANKED],
    *[(name, family) for name in ("full_shard", "zero3") for family in FAMILIES if family != "qwen3_vl"],
    *[
        pytest.param(name, family, marks=pytest.mark.exhaustive)
        for name in RANKED
        for family in [*FAMILIES, *OTHER_FAMILIES]
        if family != "qwen3_vl" and (family not in FAMILIES or name not in ("full_shard", "zero3"))
    ],
]
PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "language model": {"train__trainable": None},
    "adapter": {"train__trainable": None, "adapter__type": "lora", "adapter__r": 4},
}
"""Settings of the trained parameters. The image tower is frozen in all but the first."""


@pytest.fixture(scope="module")
def one_sided(squares: Path) -> Path:
    """Write two records. Only one has images. With one record per rank, one rank has no images."""
    records = squares.read_text("utf-8").splitlines()
    source = squares.with_name("one_sided.jsonl")
    source.write_text(f"{records[4]}\n{records[3]}\n", "utf-8")
    return source


@pytest.fixture(scope="module")
def numbers_of_one_rank(
    engines: Engines, model: Callable[[str], Path], one_sided: Path, squares: Path, tmp_path_factory: Any
) -> Callable[..., list[float]]:
    @cache
    def compute(family: str, part: str = "all") -> list[float]:
        folder = tmp_path_factory.mktemp(family)
        config = rank_run(folder, model(family), one_sided, squares, **PARTS[part])
        return numbers_of(engines, 1, config)

    return compute


def rank_run(folder: Path, source: Path, data: Path, eval_data: Path, **settings: Any) -> RunConfig:
    given_settings = {
        "strategy": "no_shard",
        "data__eval": {"source": str(eval_data)},
        "train__global_batch_size": 2,
        "train__micro_batch_size": 1,
    }
    return image_run(folder, source, data, **{**given_settings, **settings})


@pytest.mark.parametrize(("name", "family"), RANK_CASES)
def test_ranks_without_images_train_like_one_rank(
    name: str,
    family: str,
    model: Callable[[str], Path],
    one_sided: Path,
    squares: Path,
    numbers_of_one_rank: Callable[[str], list[float]],
    tmp_path: Path,
    engines: Engines,
) -> None:
    settings, size = ENGINES[name].settings, 2
    if name == "hybrid_shard":  # two groups of two ranks
        settings, size = {**settings, "train__global_batch_size": 4}, 4
    config = rank_run(tmp_path, model(family), one_sided, squares, **settings)
    actual = numbers_of(engines, size, config)
    # The norm of the gradients of the tiny Gemma 4 depends more on rounding than the norms of other models.
    tolerance = 1e-4 if family == "gemma4" else 1e-6
    assert actual == pytest.approx(numbers_of_one_rank(family), rel=tolerance)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_gradients_without_images_have_the_same_order(
    family: str, model: Callable[[str], Path], one_sided: Path, tmp_path: Path
) -> None:
    """ZeRO reduces gradients in the order in which a rank computes them."""
    settings = {"strategy": "no_shard", "train__global_batch_size": 2, "train__micro_batch_size": 1}
    config = image_run(tmp_path, model(family), one_sided, **settings)
    orders: dict[bool, list[str]] = {}
    with opened(config) as trial:
        names: list[str] = []
        for name, parameter in trial.engine.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
        for _ in range(2):
            names.clear()
            batch = next(trial.batches)
            valid = trial.backend.sum_host_numbers(trial.engine.objective.compute_weight(batch))
            trial.engine.accumulate_gradients(batch, valid, is_last_micro_batch=False)
            orders[any(column.startswith("blank_") for column in batch)] = list(names)
    assert orders[True] == orders[False]


@pytest.mark.parametrize("part", [name for name in PARTS if name != "all"])
@pytest.mark.parametrize("name", ["full_shard", "zero2", "zero3"])
def test_ranks_without_images_train_frozen_towers(
    name: str,
    part: str,
    model: Callable[[str], Path],
    one_sided: Path,
    squares: Path,
    numbers_of_one_rank: Callable[..., list[float]],
    tmp_path: Path,
    engines: Engines,
) -> None:
    settings = {**ENGINES[name].settings, **PARTS[part]}
    config = rank_run(tmp_path, model("qwen3_vl"), one_sided, squares, **settings)
    actual = numbers_of(engines, 2, config)
    assert actual == pytest.approx(numbers_of_one_rank("qwen3_vl", part), rel=1e-6)


# -- interruptions ------------------------------------------------------------------------------------------


class KilledAtStep3:
    """Callback that kills the process after step 3, unless the output folder has a file ``killed``."""

    def on_step(self, run: Any) -> None:
        note = Path(run.config.output_dir) / "killed"
        if run.step == 3 and not note.exists():
            wait_for(run.checkpoints.find_latest, 20)
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def resumable_run(folder: Path, model: Path, squares: Path, **settings: Any) -> RunConfig:
    given_settings = {
        "strategy": "full_shard",
        "train__steps": 4,
        "checkpoint__every_steps": 2,
        "checkpoint__export": True,
        "train__callbacks": ["tests.test_images:KilledAtStep3"],
        "train__dropout": True,
    }
    return image_run(folder, model, squares, **{**given_settings, **settings})


@pytest.fixture(scope="module")
def finished(qwen: Path, squares: Path, tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Path:
    """Return the folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "killed").touch()
    assert engines.run("full_shard", 1, launched, resumable_run(folder, qwen, squares)) == 0
    return folder


@pytest.fixture(scope="module")
def killed(qwen: Path, squares: Path, tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Path:
    """Return the folder of a run that was killed after step 3, with a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("killed")
    config = resumable_run(folder, qwen, squares)
    with pytest.raises(RankError, match="exit code -9"):
        engines.run("full_shard", 1, launched, config)
    return folder


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_run_resumes_bit_for_bit(
    num_workers: int,
    finished: Path,
    killed: Path,
    qwen: Path,
    squares: Path,
    tmp_path: Path,
    engines: Engines,
) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "run"))
    config = resumable_run(folder, qwen, squares, data__num_workers=num_workers)
    # The processes of an engine must not have child processes.
    assert (run_rank("cpu", config) if num_workers else engines.run("full_shard", 1, launched, config)) == 0
    assert losses(folder) == losses(finished)
    assert weights(folder) == weights(finished)


@pytest.mark.parametrize("strategy", ["full_shard", "zero3"])
def test_killed_run_resumes_on_more_ranks(
    strategy: str, finished: Path, killed: Path, qwen: Path, squares: Path, tmp_path: Path, engines: Engines
) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "run"))
    config = resumable_run(folder, qwen, squares, strategy=strategy, train__micro_batch_size=1)
    assert engines.run(strategy, 2, launched, config) == 0
    assert losses(folder) == pytest.approx(losses(finished), rel=1e-6)


# -- bad files and records ----------------------------------------------------------------------------------


def make_chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def write_png_header(path: Path, width: int, height: int) -> None:
    """Write a small file that claims to be a large image."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + make_chunk(b"IHDR", header)
        + make_chunk(b"IDAT", pixels)
        + make_chunk(b"IEND", b"")
    )


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside") / "bad"
    folder.mkdir()
    (folder / "good.png").write_bytes(make_image((0, 0, 200)))
    folder.with_name("outside.png").write_bytes(make_image((0, 0, 200)))
    write_png_header(folder / "bomb.png", 50_000, 50_000)
    write_png_header(folder / "large.png", 11_000, 11_000)
    noise = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(noise, "JPEG")
    (folder / "cut.jpg").write_bytes(noise.getvalue()[:1500])
    (folder / "text.png").write_text("hello")
    (folder / "empty.png").touch()
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    with (folder / "long.png").open("wb") as file:
        file.truncate((64 << 20) + 1)
    Image.new("RGB", (400, 1)).save(folder / "strip.png")
    Image.new("RGB", (4, 4)).save(folder / "image.ppm")
    (folder / "link.png").symlink_to(folder.with_name("outside.png"))
    return folder


def ask(*parts: dict[str, Any], reply: Any = "blue", **fields: Any) -> dict[str, Any]:
    return {"messages": [user(*parts, text("Which?")), answer(reply)], **fields}


def ask_text(question: str, reply: str = "blue", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, answer(reply)], **fields}


def read_bad_records(kind: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return bad records with the beginnings of their errors."""

    def make(parts: Sequence[dict[str, Any]] = (), **row: Any) -> dict[str, Any]:
        return ask_text(row.pop("text"), **row) if "text" in row else ask(*parts, **row)

    return {name: (make(**row), message) for name, (row, message) in ROWS[kind].items()}


GOOD = image("good.png")
UNREADABLE, UNPARSABLE = read_bad_records("unreadable"), read_bad_records("unparsable")
BAD_RECORDS = {**UNREADABLE, **UNPARSABLE}
GROUPS = [
    names[first : first + 9]  # an error lists ten records
    for names in (list(UNREADABLE), list(UNPARSABLE))
    for first in range(0, len(names), 9)
]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_bad_records_are_listed(
    names: list[str], qwen: Path, bad_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CollectedErrors.__init__, "__defaults__", (1000.0,))  # seconds
    source = write_jsonl(tmp_path / "bad.jsonl", [ask(GOOD), *(BAD_RECORDS[name][0] for name in names)])
    with pytest.raises(MultipleMistakesError) as refused:
        build(qwen, source, tmp_path, image_root=str(bad_files))
    *lines, total = refused.value.lines
    assert len(lines) == len(names)
    for line in lines:
        name = names[int(line.partition(".jsonl:")[2].partition(":")[0]) - 2]
        assert line.startswith(BAD_RECORDS[name][1].format(f"{source}:{names.index(name) + 2}")), name
        assert "\n" not in line and "; " in line
    assert f"{len(names)} bad records" in total and total.endswith("or set data.on_bad_record to skip")


def test_bad_records_are_skipped_and_counted(
    qwen: Path, bad_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record for record, _ in BAD_RECORDS.values()]
    source = write_jsonl(tmp_path / "bad.jsonl", [ask(GOOD), *records, ask(GOOD, GOOD)])
    data = build(qwen, source, tmp_path, image_root=str(bad_files), on_bad_record="skip")
    assert len(data.train) == 2 and read_cache(data).num_images == 3
    error = capsys.readouterr().err
    assert error.count("warning: skipped: data.") == 5
    assert f"{source}: {len(records)} bad records were skipped (data.on_bad_record: skip)" in error


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a text model with the processor of an image model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("text_model")
    write_processor(folder, "qwen2_5_vl", None)
    Qwen2ForCausalLM(Qwen2Config(**{**TINY_MODEL, "model_type": "qwen2"})).save_pretrained(folder)
    return folder


def change_model(qwen: Path, folder: Path, remove: str = "", write: str = "") -> Path:
    """Copy the tiny model without a file, or with an invalid file."""
    shutil.copytree(qwen, folder)
    if remove:
        (folder / remove).unlink()
    if write:
        (folder / write).write_text("{", "utf-8")
    return folder


def write_text_tokenizer(folder: Path) -> Path:
    tokenizer("llama3").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(TINY_MODEL), "utf-8")
    return folder


MODELS: dict[str, Callable[[Path, Path, Path], Path]] = {
    "image": lambda qwen, text_model, folder: qwen,
    "text": lambda qwen, text_model, folder: text_model,
    "tokenizer": lambda qwen, text_model, folder: write_text_tokenizer(folder),
    "without": lambda qwen, text_model, folder: change_model(qwen, folder, remove="processor_config.json"),
    "damaged": lambda qwen, text_model, folder: change_model(qwen, folder, write="processor_config.json"),
}
REFUSED_RECORDS: dict[str, dict[str, Any]] = {
    "image": ask(GOOD),
    "pair": {"prompt": [user(GOOD)], "chosen": [answer("blue")], "rejected": [answer("red")]},
    "strings": {"prompt": "a", "completion": "b", "images": ["good.png"]},
    "question": {"question": "<image>?", "answer": "b", "picture": "good.png"},
}


@pytest.mark.parametrize("case", ROWS["refused"])
def test_unusable_settings_are_one_error_line(
    case: str,
    qwen: Path,
    text_model: Path,
    bad_files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record, settings, kind, message = ROWS["refused"][case]
    model, source = MODELS[kind](qwen, text_model, tmp_path / "model"), tmp_path / "records.jsonl"
    write_jsonl(source, [REFUSED_RECORDS[record]])
    given_settings = {
        "backend": "cpu",
        "output_dir": str(tmp_path / "run"),
        "model.name_or_path": str(model),
        "data.source": str(source),
        "data.image_root": str(bad_files),
        "data.seq_len": 64,
        "data.cache_dir": str(tmp_path / "cache"),
        "data.eval_fraction": 0,
        "train.global_batch_size": 1,
    }
    assert main(flags({**given_settings, **settings})) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {message.format(model=model, source=source)}")
    assert "; " in errors[0] and not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize("number", [0, 999])
def test_rare_images_are_detected(
    number: int, is_evaluated: bool, qwen: Path, bad_files: Path, tmp_path: Path
) -> None:
    records = [ask_text(f"{index}?") for index in range(1000)]
    plain = write_jsonl(tmp_path / "plain.jsonl", records)
    records[number] = ask(GOOD)
    rare = write_jsonl(tmp_path / "rare.jsonl", records)
    settings = {"data__eval": {"source": str(rare)}} if is_evaluated else {}
    source = plain if is_evaluated else rare
    for text_only in (False, True):
        if text_only:
            rare.write_text(plain.read_text("utf-8"), "utf-8")
        config = image_run(tmp_path / "run", qwen, source, data__format="messages", **settings)
        assert bool(resolve_images(config, downloads=False).data.images) != text_only


@pytest.mark.parametrize("backend", ["xla", "tpu"])
def test_backend_without_images_is_rejected(
    backend: str, qwen: Path, bad_files: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "records.jsonl", [ask(GOOD)])
    with pytest.raises(
        UserError, match=f"backend: {backend} does not support images .*; set backend to cuda or cpu"
    ):
        image_run(tmp_path, qwen, source, backend=backend, data__images=True, data__format="messages")


@pytest.fixture(scope="module")
def server(bad_files: Path) -> Iterator[str]:
    """Serve ``bad_files``. Returns the URL of the folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/leak":
                self.send_response(302)
                self.send_header("Location", "file:///etc/hostname")
                self.end_headers()
            elif self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", f"http://{self.headers['Host']}/good.png")
                self.end_headers()
            elif self.path == "/slow":
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):  # the client closes the connection
                    for _ in range(100):
                        self.wfile.write(b"x")
                        time.sleep(0.05)
            else:
                super().do_GET()

    service = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(bad_files)))
    threading.Thread(target=service.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{service.server_address[1]}"
    service.shutdown()


def test_images_are_downloaded_if_allowed(
    server: str, qwen: Path, bad_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(images, "_DOWNLOAD_SECONDS", 0.5)
    names = ("good.png", "none.png", "leak", "slow")
    records = [ask({"type": "image", "url": f"{server}/{name}"}) for name in names]
    source = write_jsonl(tmp_path / "records.jsonl", records)
    with pytest.raises(MultipleMistakesError) as refused:
        build(qwen, source, tmp_path, image_urls="private")
    missing, leak, slow, _ = refused.value.lines
    assert f"cannot read the image '{server}/none.png' (HTTP Error 404: File not found)" in missing
    assert f"cannot read the image '{server}/leak' (" in leak and "file" in leak
    assert "/slow' (the download took longer than the limit of 0 seconds)" in slow
    data = build(qwen, source, tmp_path, image_urls="private", on_bad_record="skip")
    (image_file,) = read_cache(data).read_image_files(0, 256)
    assert image_file.data == (bad_files / "good.png").read_bytes()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.%31", "localhost", "redirect"])
def test_private_addresses_need_a_setting(
    host: str, server: str, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of a public dataset must not reach servers in the user's network."""
    monkeypatch.setenv("no_proxy", "*")
    requests: list[str] = []
    port = server.rpartition(":")[2]
    url = f"http://{'127.0.0.1' if host == 'redirect' else host}:{port}/good.png"
    if host == "redirect":  # only the address of the second connection is private
        check, number = images._check_address_is_public, itertools.count()
        monkeypatch.setattr(
            images, "_check_address_is_public", lambda peer: check(peer) if next(number) else None
        )
        url = f"{server}/moved"
    monkeypatch.setattr(http.client.HTTPResponse, "read1", lambda *_: requests.append(url))
    source = write_jsonl(tmp_path / "records.jsonl", [ask({"type": "image", "url": url})])
    with pytest.raises(
        UserError, match=r"\(127\.0\.0\.1 is a private address, but only data\.image_urls: private allows"
    ):
        build(qwen, source, tmp_path, image_urls=True)
    assert not requests


# -- decoding -----------------------------------------------------------------------------------------------


def encode(picture: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def list_files() -> dict[str, bytes]:
    """Return image files of all modes and formats."""
    generator = np.random.default_rng(0)
    rgb = Image.fromarray(generator.integers(0, 255, (12, 20, 3), dtype=np.uint8))
    rgba = Image.fromarray(generator.integers(0, 255, (12, 20, 4), dtype=np.uint8))
    deep = Image.fromarray(generator.integers(0, 65535, (12, 20), dtype=np.uint16))
    palette, turned, exif = rgb.quantize(8), rgb.rotate(180), Image.Exif()
    exif[0x112] = 6  # turned by 90 degrees
    frames: dict[str, Any] = {"save_all": True, "append_images": [turned]}
    return {
        "CMYK": encode(rgb.convert("CMYK"), "JPEG"),
        "gray": encode(rgb.convert("L"), "PNG"),
        "gray with alpha": encode(rgba.convert("LA"), "PNG"),
        "alpha": encode(rgba, "PNG"),
        "16 bits": encode(deep, "PNG"),
        "1 bit": encode(rgb.convert("1"), "PNG"),
        "palette": encode(palette, "PNG"),
        "transparent color": encode(palette, "PNG", transparency=0),
        "transparent colors": encode(palette, "PNG", transparency=bytes([0, 100, 255, 3])),
        "transparent RGB": encode(rgb, "PNG", transparency=(1, 2, 3)),
        "turned JPEG": encode(rgb, "JPEG", exif=exif),
        "turned PNG": encode(rgb, "PNG", exif=exif),
        "progressive": encode(rgb, "JPEG", progressive=True),
        "GIF": encode(rgb, "GIF"),
        "animated GIF": encode(palette, "GIF", **frames),
        "animated WebP": encode(rgb, "WEBP", lossless=True, **frames),
        "animated PNG": encode(rgb, "PNG", **frames),
        "pages": encode(rgb, "TIFF", **frames),
        "CMYK TIFF": encode(rgb.convert("CMYK"), "TIFF"),
        "photos": encode(rgb, "MPO", **frames),
        "BMP": encode(rgb, "BMP"),
        "one pixel": encode(rgb.resize((1, 1)), "PNG"),
    }


@pytest.mark.parametrize("name", ["compressed text", "color profile"])
def test_compressed_metadata_is_limited(name: str) -> None:
    """A small file may contain metadata that would fill the memory."""
    bomb = zlib.compress(bytes(200 << 20), 9)
    kind = b"zTXt" if name == "compressed text" else b"iCCP"
    good = make_image((0, 0, 200))
    data = good[:33] + make_chunk(kind, b"name\0\0" + bomb) + good[33:]
    peak = measure_peak(lambda: decode_without_error(data))
    assert peak < 64 << 20


def decode_without_error(data: bytes) -> None:
    with suppress(ValueError):
        decode_image(data)


def measure_peak(function: Callable[[], None]) -> int:
    """Return the largest memory in bytes that Python allocates while a function runs."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_only_first_frame_is_decoded() -> None:
    frames = [Image.new("P", (64, 64), index % 200) for index in range(3000)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    start = time.perf_counter()
    assert decode_image(data).size == (64, 64)
    assert time.perf_counter() - start < 1


def test_images_are_decoded_like_transformers(tmp_path: Path) -> None:
    for name, data in list_files().items():
        (tmp_path / "file").write_bytes(data)
        expected = np.asarray(load_image(str(tmp_path / "file")))
        np.testing.assert_array_equal(np.asarray(decode_image(data)), expected, name)


# -- truncation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "packing"), [("qwen2_5_vl", False), ("mistral3", "documents"), ("smolvlm", False)]
)
def test_truncation_never_cuts_an_image(family: str, packing: Any, pictures: Path, tmp_path: Path) -> None:
    """A sample has an image if all tokens of the image are in the sample."""
    processor = write_processor(tmp_path / "model", family, None)
    talk = [user(image("a.png"), image("b.png"), text("?")), answer("1"), user(image("c.png")), answer("2")]
    short = [user(text("1")), answer("1")]
    source = write_jsonl(tmp_path / "talks.jsonl", [{"messages": talk}, {"messages": short}])
    _, images = load_images(talk, pictures)
    settings = {"image_root": str(pictures), "train_on": "all", "packing": packing}
    tokens = read_cache(build(tmp_path / "model", source, tmp_path, **settings))
    placed, ids = tokens.list_images(0), tokens.read_document("text", 0).astype(np.int64)
    least = len(tokens.read_document("text", 1))
    edges = {
        edge for single in placed for edge in (single.first_token, single.first_token + single.num_tokens)
    }
    for seq_len in sorted({edge + shift for edge in edges for shift in (-1, 0, 1)} | {len(ids)}):
        if seq_len < least:
            continue
        data = build(tmp_path / "model", source, tmp_path, seq_len=seq_len, **settings)
        index = next(index for index in range(2) if 0 in data.train.list_document_numbers(index))
        batch = {
            name: values.numpy() for name, values in data.train.build_batch([EpochIndex(0, index)]).items()
        }
        trained = tokens.read_trained_mask("text", 0)
        assert trained is not None
        limit = min(seq_len, len(ids) - 1)
        count = next(
            (
                single.first_token
                for single in placed
                if single.first_token < limit < single.first_token + single.num_tokens
            ),
            limit,
        )
        start = 0
        if packing and len(data.train) == 1 and data.train.list_document_numbers(0)[0] == 1:
            start = least - 1
        targets = np.where(trained, ids, IGNORED_LABEL)[1 : count + 1]
        assert batch["input_ids"][0, start : start + count].tolist() == ids[:count].tolist()
        assert batch["labels"][0, start : start + count].tolist() == targets.tolist()
        if len(data.train) == 2:
            assert (batch["labels"][0, count:] == IGNORED_LABEL).all()
        if num_kept := sum(single.first_token < count for single in placed):
            text_of_images = processor.image_token * num_kept
            expected = processor(text=[text_of_images], images=[images[:num_kept]], return_tensors="np")
            np.testing.assert_array_equal(batch["pixel_values"], expected["pixel_values"])
        else:
            assert "pixel_values" not in batch and "blank_pixel_values" in batch


def test_truncation_statistics_count_removed_images(pictures: Path, qwen: Path, tmp_path: Path) -> None:
    talk = [user(image("a.png")), answer("1"), user(image("e.png")), answer("2")]
    rows = [{"messages": talk}, {"messages": [user(text("a" * 90)), answer("late")]}]
    source = write_jsonl(tmp_path / "talks.jsonl", rows)
    data = build(qwen, source, tmp_path, image_root=str(pictures), seq_len=40)
    second = read_cache(data).list_images(0)[1]
    assert second.first_token < 40 < second.first_token + second.num_tokens
    stats = data.tokenized_sources[""].truncation_stats
    assert stats is not None and len(data.train) == 1
    length = len(read_cache(data).read_document("text", 0))
    assert (stats.cut, stats.unanswered, stats.cut_tokens) == (1, 1, length - second.first_token)
    dropped = build(qwen, source, tmp_path, image_root=str(pictures), seq_len=100, truncation="drop")
    assert len(dropped.train) == 1


# -- formats ------------------------------------------------------------------------------------------------

TWO = ("a.png", "b.png")
QUESTION = text("Same?")


def ask_two(make: Callable[[str], dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"messages": [user(*map(make, TWO), QUESTION), answer("No")], **fields}


def list_formats(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the same conversation in all formats of JSON."""
    coded = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in TWO}
    urls = {name: f"data:image/png;base64,{data}" for name, data in coded.items()}
    names, empty = list(TWO), {"type": "image"}
    plain = [{"role": "user", "content": "Same?"}, answer("No")]
    marked = [{"role": "user", "content": "<image><image>Same?"}, answer("No")]
    return {
        "path": ask_two(image),
        "image": ask_two(lambda name: {"type": "image", "image": name}),
        "dotted path": ask_two(lambda name: image(f"./x/../{name}")),
        "absolute path": ask_two(lambda name: image(str(folder / name))),
        "file URL": ask_two(lambda name: {"type": "image", "url": f"file://{folder / name}"}),
        "data URL": ask_two(lambda name: {"type": "image", "url": urls[name]}),
        "base64": ask_two(lambda name: {"type": "image", "base64": coded[name]}),
        "OpenAI": ask_two(lambda name: {"type": "image_url", "image_url": {"url": urls[name]}}),
        "OpenAI with path": ask_two(lambda name: {"type": "image_url", "image_url": name}),
        "OpenAI responses": ask_two(lambda name: {"type": "input_image", "image_url": urls[name]}),
        "Anthropic": ask_two(
            lambda name: {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": coded[name]},
            }
        ),
        "images": ask_two(lambda _: empty, images=names),
        "images of mappings": ask_two(lambda _: empty, images=[{"path": name} for name in names]),
        "images of data URLs": ask_two(lambda _: empty, images=list(urls.values())),
        "images as JSON": ask_two(lambda _: empty, images=json.dumps(names)),
        "marks": {"messages": marked, "images": names},
        "no marks": {"messages": plain, "images": names},
        "list in image": {"messages": plain, "image": names},
        "ShareGPT": {
            "conversations": [
                {"from": "human", "value": "<image><image>Same?"},
                {"from": "gpt", "value": "No"},
            ],
            "images": names,
        },
        "Alpaca": {"instruction": "<image><image>Same?", "input": "", "output": "No", "images": names},
        "Alpaca without marks": {"instruction": "Same?", "output": "No", "images": names},
        "prompt": {"prompt": ask_two(image)["messages"][:1], "completion": [answer("No")]},
        "prompt and images": {"prompt": plain[:1], "completion": plain[1:], "images": names},
    }


def read_only_document(data: RunData) -> tuple[list[int], list[Any], list[bytes]]:
    """Return the tokens of the only document, the places of its images, and their files."""
    tokens = read_cache(data)
    assert tokens.num_documents == 1
    places = [(placed.size, placed.first_token, placed.num_tokens) for placed in tokens.list_images(0)]
    return (
        tokens.read_document("text", 0).tolist(),
        places,
        [file.data for file in tokens.read_image_files(0, 256)],
    )


def test_formats_have_the_same_tokens_and_images(pictures: Path, qwen: Path, tmp_path: Path) -> None:
    expected = None
    for name, record in list_formats(pictures).items():
        source = write_jsonl(tmp_path / f"{name}.jsonl", [record])
        actual = read_only_document(build(qwen, source, tmp_path, image_root=str(pictures)))
        expected = expected or actual
        assert actual == expected, name
    assert expected is not None and expected[2] == [(pictures / name).read_bytes() for name in TWO]


def test_tables_have_the_same_tokens_and_images(pictures: Path, qwen: Path, tmp_path: Path) -> None:
    """Columns of images of the datasets library, in files and in saved datasets, and .csv files."""
    datasets = pytest.importorskip("datasets")
    value, picture = datasets.Value("string"), datasets.Image()
    part = {"type": value, "text": value}
    files = [{"bytes": (pictures / name).read_bytes(), "path": name} for name in TWO]
    parts = [{"type": "image", "text": None}] * 2 + [{"type": "text", "text": "Same?"}]
    talk = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "No"}]},
    ]
    column = datasets.Dataset.from_dict(
        {"messages": [talk], "images": [files]},
        features=datasets.Features(
            {"messages": [{"role": value, "content": [part]}], "images": datasets.List(picture)}
        ),
    )
    inside = [
        {
            "role": "user",
            "content": [
                *({"type": "image", "text": None, "image": file} for file in files),
                {"type": "text", "text": "Same?", "image": None},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "No", "image": None}]},
    ]
    nested = datasets.Dataset.from_dict(
        {"messages": [inside]},
        features=datasets.Features({"messages": [{"role": value, "content": [{**part, "image": picture}]}]}),
    )
    asked = datasets.Dataset.from_dict(
        {"picture": [files], "question": ["Same?"], "answer": ["No"]},
        features=datasets.Features({"picture": datasets.List(picture), "question": value, "answer": value}),
    )
    renamed = {"instruction": "question", "output": "answer", "images": "picture"}
    sources: dict[str, dict[str, Any]] = {}
    for name, table in (("column", column), ("nested", nested), ("asked", asked)):
        table.to_parquet(tmp_path / f"{name}.parquet")
        table.save_to_disk(tmp_path / name)
        settings = {"columns": renamed} if name == "asked" else {}
        sources |= {f"{name}.parquet": settings, name: settings}
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer", "picture"], ["Same?", "No", json.dumps(TWO)]])
    sources["table.csv"] = {"columns": renamed, "image_root": str(pictures)}
    first = write_jsonl(tmp_path / "first.jsonl", [ask_two(image)])
    expected = read_only_document(build(qwen, first, tmp_path, image_root=str(pictures)))
    for name, settings in sources.items():
        actual = read_only_document(build(qwen, tmp_path / name, tmp_path / "cache", **settings))
        assert actual == expected, name


def test_saved_dataset_keeps_files_that_png_cannot_store(qwen: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = list_files()["CMYK"]
    (tmp_path / "cmyk.jpg").write_bytes(file)
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "instruction": datasets.Value("string"),
            "output": datasets.Value("string"),
        }
    )
    for name, picture in (("bytes", {"bytes": file, "path": None}), ("path", str(tmp_path / "cmyk.jpg"))):
        row = {"image": [picture], "instruction": ["What?"], "output": ["Noise"]}
        dataset = datasets.Dataset.from_dict(row, features=features)
        dataset.save_to_disk(tmp_path / name)
        (actual,) = read_only_document(build(qwen, tmp_path / name, tmp_path / "cache"))[2]
        assert actual == file


def make_pictures() -> list[dict[str, Any]]:
    """Return records with images of Pillow, one of which PNG cannot store and one of which is turned."""
    opened_files = [Image.open(io.BytesIO(list_files()[name])) for name in ("CMYK", "turned JPEG")]
    return [{"instruction": "What?", "output": "Noise", "images": opened_files}]


def test_code_may_yield_images_of_pillow(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_pictures, "fingerprint", "1", raising=False)
    data = build(qwen, "tests.test_images:Pictures", tmp_path)
    actual = read_only_document(data)[2]
    for name, file in zip(("CMYK", "turned JPEG"), actual, strict=True):
        expected = np.asarray(decode_image(list_files()[name]))
        np.testing.assert_array_equal(np.asarray(decode_image(file)), expected)


class Pictures:
    """Records of custom code, with images of Pillow."""

    fingerprint = "1"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(make_pictures())


def test_images_of_several_folders_need_a_root(pictures: Path, qwen: Path, tmp_path: Path) -> None:
    """Two folders may have different images of the same name."""
    sources = []
    for name in ("single", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(pictures / ("a.png" if name == "single" else "b.png"), tmp_path / name / "a.png")
        record = ask(image("a.png"), reply=name)
        sources.append(str(write_jsonl(tmp_path / name / "records.jsonl", [record])))
    with pytest.raises(
        UserError,
        match=r"a local path, but the files of the source are in several folders; set data\.image_root",
    ):
        build(qwen, tuple(sources), tmp_path)
    data = build(qwen, tuple(sources), tmp_path, image_root=str(tmp_path / "two"))
    assert {file.data for number in (0, 1) for file in read_cache(data).read_image_files(number, 99)} == {
        (pictures / "b.png").read_bytes()
    }
    single = build(qwen, sources[0], tmp_path)  # the folder of the source
    assert read_only_document(single)[2] == [(pictures / "a.png").read_bytes()]


# -- the cache ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_pictures(pictures: Path, tmp_path: Path) -> Path:
    """Return a copy of the images that a test may change."""
    return Path(shutil.copytree(pictures, tmp_path / "pictures"))


def write_talks(folder: Path, records: int) -> Path:
    """Write records about the images of a folder, which repeat after a while."""
    names = sorted(SIZES)
    rows = [ask(image(names[index % len(names)]), reply=f"number {index}") for index in range(records)]
    return write_jsonl(folder / "talks.jsonl", rows)


def read_files(data: RunData) -> list[bytes]:
    tokens = read_cache(data)
    return [
        file.data for number in range(tokens.num_documents) for file in tokens.read_image_files(number, 999)
    ]


def test_cache_has_every_image_once(own_pictures: Path, qwen: Path, tmp_path: Path) -> None:
    shutil.copy(own_pictures / "a.png", own_pictures / "copy.png")
    rows = [ask(image("a.png"), image("copy.png")), ask(image("a.png")), ask(image("b.png"))]
    data = build(qwen, write_jsonl(own_pictures / "talks.jsonl", rows), tmp_path / "cache")
    sizes = {name: (own_pictures / name).stat().st_size for name in ("a.png", "b.png")}
    assert (read_cache(data).folder / "images.bin").stat().st_size == sum(sizes.values())
    assert len(read_files(data)) == read_cache(data).num_images == 4


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda folder: None, False),
    "other image": (lambda folder: shutil.copy(folder / "b.png", folder / "a.png"), True),
    "other content of same size": (lambda folder: replace_in_place(folder / "a.png"), True),
    "touched": (lambda folder: os.utime(folder / "a.png", ns=(1, 1)), False),
    "removed": (lambda folder: (folder / "a.png").unlink(), False),
}
"""Changes to image files, and whether the cache has to notice them."""


def replace_in_place(path: Path) -> None:
    """Change a byte of a file, but neither its size nor the time of its last modification."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_image_is_tokenized_again(
    change: str, own_pictures: Path, qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_talks(own_pictures, 7)
    before = build(qwen, source, tmp_path / "cache")
    expected, folder = read_files(before), read_cache(before).folder
    written = (folder / "meta.json").stat().st_mtime_ns
    make, is_noticed = CHANGES[change]
    make(own_pictures)
    for _ in range(2):
        after = build(qwen, source, tmp_path / "cache")
        if is_noticed:
            assert read_files(after) != expected and after.fingerprint != before.fingerprint
            assert (own_pictures / "a.png").read_bytes() in read_files(after)
        else:
            assert read_files(after) == expected and after.fingerprint == before.fingerprint
            assert (folder / "meta.json").stat().st_mtime_ns == written
    error = capsys.readouterr().err
    note = f"warning: data.cache_dir: {folder}: the image 'a.png' has changed; recreating the folder"
    assert error.count(note) == is_noticed


def test_copied_images_are_compared_once(
    own_pictures: Path, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_talks(own_pictures, 7)
    first = build(qwen, source, tmp_path / "cache")
    moved = tmp_path / "moved"
    shutil.copytree(own_pictures, moved, copy_function=shutil.copyfile)
    compared: list[Path] = []
    compute = images._compute_file_digest

    def compute_and_record(path: Path) -> str:
        compared.append(path)
        return compute(path)

    monkeypatch.setattr(images, "_compute_file_digest", compute_and_record)
    for _ in range(2):
        second = build(qwen, moved / source.name, tmp_path / "cache")
        assert second.fingerprint == first.fingerprint
        assert read_cache(second).folder == read_cache(first).folder
        assert len(compared) == len(SIZES)


def test_added_image_ends_skipping_of_its_record(own_pictures: Path, qwen: Path, tmp_path: Path) -> None:
    source = write_jsonl(own_pictures / "talks.jsonl", [ask(image("a.png")), ask(image("late.png"))])
    assert len(build(qwen, source, tmp_path / "cache", on_bad_record="skip").train) == 1
    assert len(build(qwen, source, tmp_path / "cache", on_bad_record="skip").train) == 1
    shutil.copy(own_pictures / "b.png", own_pictures / "late.png")
    assert len(build(qwen, source, tmp_path / "cache", on_bad_record="skip").train) == 2


def test_image_settings_have_separate_caches(own_pictures: Path, qwen: Path, tmp_path: Path) -> None:
    source = write_jsonl(own_pictures / "talks.jsonl", [ask(image("e.png"))])
    settings: list[dict[str, Any]] = [{}, {"image_max_pixels": 256}, {"image_root": str(own_pictures)}]
    folders = [
        read_cache(build(qwen, source, tmp_path, **given_settings)).folder for given_settings in settings
    ]
    assert len(set(folders)) == len(settings)
    (placed,) = TokenCache.open(folders[1]).list_images(0)
    assert placed.size.width * placed.size.height <= 256


@pytest.mark.parametrize("name", ["images.bin", "image_rows.bin", "images.idx", "image_files.jsonl"])
def test_damaged_images_are_detected(
    name: str, own_pictures: Path, qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_talks(own_pictures, 7)
    before = build(qwen, source, tmp_path / "cache")
    expected, path = read_files(before), read_cache(before).folder / name
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CacheDamagedError):
        TokenCache.open(path.parent)
    after = build(qwen, source, tmp_path / "cache")
    assert read_files(after) == expected and after.fingerprint == before.fingerprint
    assert f"{path.parent}: is damaged; recreating the folder" in capsys.readouterr().err


def test_damage_while_training_ends_the_run(
    own_pictures: Path, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files are checked when they are read."""
    data = build(qwen, write_talks(own_pictures, 7), tmp_path / "cache")
    path = read_cache(data).folder / "images.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr("portable.data.tokens.cache.MAX_FULLY_CHECKED_BYTES", 0)
    with pytest.raises(
        RunError, match=r"images\.bin: is damaged at byte 0; run the same command to tokenize"
    ):
        read_files(replace(data, tokenized_sources={"": replace_tokens(data, TokenCache.open(path.parent))}))


def replace_tokens(data: RunData, tokens: TokenCache) -> Any:
    return replace(data.tokenized_sources[""], tokens=tokens)


@pytest.mark.parametrize("number", [0, 2])
def test_killed_tokenizing_resumes_to_same_cache(
    number: int, own_pictures: Path, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(tokenizing, "_SAVE_SECONDS", 0.0)
    source = write_talks(own_pictures, 22)
    expected = build(qwen, source, tmp_path / "whole")
    kill_build(number, lambda: build(qwen, source, tmp_path / "killed"))
    resumed = build(qwen, source, tmp_path / "killed")
    assert resumed.fingerprint == expected.fingerprint
    for name in ("images.bin", "image_rows.bin", "images.idx", "image_files.jsonl", "text.bin"):
        actual, wanted = ((read_cache(data).folder / name).read_bytes() for data in (resumed, expected))
        assert actual == wanted, name


# -- mixtures, samples and adapters -------------------------------------------------------------------------


def test_mixture_of_texts_and_images_trains_like_one_source(
    qwen: Path, squares: Path, tmp_path: Path, engines: Engines
) -> None:
    """A batch has rows of several sources, whose images are in the order of the rows."""
    lines = squares.read_text("utf-8").splitlines(keepends=True)
    names = ("texts", "squares")
    with_images: dict[str, list[str]] = {"texts": [], "squares": []}
    for line in lines:
        with_images["squares" if "path" in line else "texts"].append(line)
    sources = []
    for name in names:
        path = squares.with_name(f"{name}_part.jsonl")
        path.write_text("".join(with_images[name]), "utf-8")
        sources.append({"name": name, "source": str(path)})
    mixed = {"data__source": None, "data__sources": sources, "data__images": True}
    settings = {"strategy": "no_shard", "train__steps": 1, "train__micro_batch_size": 8}
    settings |= {"train__global_batch_size": len(lines), "train__learning_rate": 1e-9}
    actual, expected = (
        numbers_of(engines, 1, image_run(tmp_path / name, qwen, squares, **settings, **more))
        for name, more in (("mixed", mixed), ("single", {}))
    )
    assert actual == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("engine", ["full_shard", "zero3"])
def test_sample_text_continues_the_image(
    engine: str,
    qwen: Path,
    squares: Path,
    tmp_path: Path,
    engines: Engines,
) -> None:
    """The text at the end of a run is what transformers generates with the image."""
    records = squares.read_text("utf-8").splitlines()
    source = squares.with_name("sample.jsonl")
    source.write_text(records[4] + "\n", "utf-8")
    config = image_run(
        tmp_path / "run",
        qwen,
        source,
        strategy=engine,
        train__steps=1,
        train__global_batch_size=2,
        train__micro_batch_size=1,
        checkpoint__export=True,
        log__sample_tokens=6,
    )
    actual = engines.run(engine, 2, printed_sample, config)
    assert "--- prompt" in actual, actual
    prompt, continued = actual.partition("--- prompt\n")[2].split("\n--- the model continues\n")
    assert prompt.count("[image ") == 2 and "Which color?" in prompt
    final = tmp_path / "run" / "final"
    processor = AutoProcessor.from_pretrained(final)
    model = AutoModelForImageTextToText.from_pretrained(final, dtype=torch.float32)
    talk, images = load_images(json.loads(records[4])["messages"][:1], squares.parent)
    rendered = processor.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[rendered], images=[images], return_tensors="pt")
    torch.manual_seed(config.seed)
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=True, temperature=0.8, top_k=50)
    expected = processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])
    assert continued.partition("\n---")[0] == expected


def printed_sample(config: RunConfig) -> str:
    """Run completely on one rank. Returns the printed text."""
    captured = io.StringIO()
    with redirect_stderr(captured):
        assert launched(config) == 0
    return captured.getvalue()


# -- sizes of images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, "documents"])
def test_memory_trial_has_the_largest_images(packing: Any, qwen: Path, squares: Path, tmp_path: Path) -> None:
    """The tokens of images in each sample are counted without building it."""
    data = build(qwen, squares, tmp_path, packing=packing, seq_len=96)
    counted, token = data.train.count_image_tokens(), AutoProcessor.from_pretrained(qwen).image_token_id
    assert counted is not None
    batches = [data.train.build_batch([EpochIndex(0, index)]) for index in range(len(data.train))]
    assert counted.tolist() == [int((batch["input_ids"] == token).sum()) for batch in batches]
    trial = data.train.list_trial_samples(3)
    assert len(trial) == 3 and len(set(trial)) == 1
    patches = [len(batch.get("pixel_values", ())) for batch in batches]
    assert patches[trial[0].sample_index] == max(patches)
    sizes = data.sizes.images
    assert sizes is not None and sizes.images == 15 and sizes.documents == 12
    assert sizes.largest_tokens == max(data.first_tokens.count_image_tokens(96))
    assert len(sizes.largest) == 2


def test_plan_counts_tokens_of_images(qwen: Path, squares: Path, tmp_path: Path) -> None:
    """The time of the image tower depends on the images, not on the padding of the samples."""
    config = image_run(tmp_path, qwen, squares, train__steps=None, train__epochs=3)
    data = build(qwen, squares, tmp_path, seq_len=160)
    work = estimate_training_work(config, data.sizes)
    counts = data.train.count_image_tokens()
    assert counts is not None and work is not None and len(counts) == 16
    assert work.image_tokens == 3 * counts.sum() < work.tokens


@pytest.mark.parametrize("has_processor", [True, False])
def test_init_counts_tokens_of_images(has_processor: bool, qwen: Path, squares: Path, tmp_path: Path) -> None:
    folder = qwen if has_processor else change_model(qwen, tmp_path / "model", "processor_config.json")
    estimate = estimate_dataset_size(image_run(tmp_path, folder, squares))
    tokens = build(qwen, squares, tmp_path)
    expected = read_cache(tokens).num_image_tokens if has_processor else 1024 * read_cache(tokens).num_images
    assert estimate.num_image_tokens == expected < estimate.num_tokens


# -- learning to name colors --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that writes conversations about red and blue squares of many shades.

    The function gets the answers for red and for blue squares.
    """
    folder, generator = tmp_path_factory.mktemp("colors"), np.random.default_rng(0)
    for index in range(32):
        shade = np.array(((200, 40, 40), (40, 40, 200))[index % 2]) + generator.integers(-40, 40, 3)
        color: Any = tuple(shade.clip(0, 255).tolist())
        (folder / f"{index}.png").write_bytes(make_image(color, ((16, 16), (24, 16))[index % 3 == 0]))

    def write(*names: str) -> Path:
        rows = [
            {"messages": [user(image(f"{index}.png"), text("Color?")), answer(names[index % 2])]}
            for index in range(32)
        ]
        return write_jsonl(folder / f"{names[0]}.jsonl", rows)

    return write


def name_colors(folder: Path) -> list[str]:
    """Return the answers of a model about two red and two blue squares, generated by transformers."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": [{"type": "image"}, text("Color?")]}]
    rendered = processor.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    said = []
    for shade in ((210, 30, 50), (180, 60, 60), (30, 50, 210), (60, 20, 170)):
        inputs = processor(text=[rendered], images=[[Image.new("RGB", (16, 16), shade)]], return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        said.append(processor.tokenizer.decode(tokens))
    return said


def color_run(folder: Path, source: Path, data: Path, **settings: Any) -> RunConfig:
    given_settings = {
        "data__seq_len": 48,
        "train__global_batch_size": 8,
        "train__micro_batch_size": 4,
        "train__learning_rate": 1e-2,
        "train__steps": 40,
        "checkpoint__every_steps": 20,
        "checkpoint__export": True,
    }
    return image_run(folder, source, data, **{**given_settings, **settings})


@pytest.fixture(scope="module")
def painter(
    colors: Callable[[str, str], Path], qwen: Path, tmp_path_factory: pytest.TempPathFactory, engines: Engines
) -> Path:
    """Train with ZeRO-3, move to FSDP2, and return the exported model."""
    folder, data = tmp_path_factory.mktemp("painter"), colors("red", "blue")
    first = color_run(folder, qwen, data, strategy="zero3", train__stop_after=20)
    assert engines.run("zero3", 2, launched, first) == 0
    second = color_run(folder, qwen, data, strategy="full_shard")
    assert engines.run("full_shard", 2, launched, second) == 0
    assert sorted(losses(folder)) == list(range(1, 41))
    return folder / "final"


def test_exported_model_names_colors(painter: Path, qwen: Path) -> None:
    assert name_colors(painter) == ["red<|im_end|>"] * 2 + ["blue<|im_end|>"] * 2
    for name in ("processor_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (painter / name).is_file()
    published, ours = (AutoProcessor.from_pretrained(folder) for folder in (qwen, painter))
    assert ours.to_json_string() == published.to_json_string()


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_merged_adapter_swaps_names_of_colors(
    export: str, painter: Path, colors: Callable[[str, str], Path], tmp_path: Path, engines: Engines
) -> None:
    config = color_run(
        tmp_path / "run",
        painter,
        colors("blue", "red"),
        strategy="full_shard",
        train__trainable=None,
        adapter__type="lora",
        adapter__r=8,
        checkpoint__export="merged" if export == "merged" else True,
    )
    assert engines.run("full_shard", 1 if export == "merged" else 2, launched, config) == 0
    final = tmp_path / "run" / "final"
    if export == "adapter":
        adapter, final = final, tmp_path / "merged"
        assert convert([str(adapter), str(final), "--merge-into", str(painter), "--quiet"]) == 0
    assert name_colors(final) == ["blue<|im_end|>"] * 2 + ["red<|im_end|>"] * 2
