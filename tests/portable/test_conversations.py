"""Conversations: formats, errors, truncation, the cache, and a run that learns to stop."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
import yaml
from PIL import Image

from portable.batch import IGNORED_LABEL
from portable.cli import main
from portable.config import load_config
from portable.converters.cli import main as convert
from portable.data.dataset import build_data, inspect_data_sizes
from portable.data.sources.conversations import PlainCompletion, detect_record_format, parse_conversation
from portable.data.sources.documents import Conversation
from portable.data.tokens import parallel_map
from portable.data.tokens import tokenize as tokenizing
from portable.data.tokens.parallel_map import map_in_order
from portable.errors import MultipleMistakesError, RunError, UserError
from portable.run.rank import run_rank
from tests.converters.compare import tree
from tests.image_models import write_image_model, write_squares
from tests.portable.chat_support import GREETING, SYSTEM, TALK, template, tokenizer
from tests.portable.data_support import Settings, kill_build, read_sample, replace, write_jsonl
from tests.portable.parallel_work import work
from tests.runs import TINY_MODEL, configured, flags, tiny

QUESTION, ANSWER = GREETING
ROWS = yaml.safe_load(Path(__file__).with_name("conversations_rows.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama3")
    tokenizer("llama3").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def settings(tmp_path: Path, llama3: str) -> Settings:
    return Settings(
        source=str(tmp_path / "chat.jsonl"),
        tokenizer=llama3,
        vocab_size=None,
        cache_dir=tmp_path / "cache",
        packing=False,
        seq_len=64,
        eval_fraction=0,
    )


def written(settings: Settings, *rows: dict[str, Any], **values: Any) -> Settings:
    write_jsonl(Path(settings.source), rows)
    return replace(settings, **values)


def texts(settings: Settings) -> list[tuple[str, str]]:
    """Return each sample with its trained text."""
    data = build_data(settings)
    found = []
    for index in range(len(data.train)):
        row = read_sample(data.train, index)
        inputs, labels = row["input_ids"], row["labels"]
        whole = inputs[row["attention_mask"].bool()]
        found.append((data.tokenizer.decode(whole), data.tokenizer.decode(labels[labels != IGNORED_LABEL])))
    return found


# -- formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ROWS["formats"], ids=str)
def test_conversation_formats_are_equivalent(case: dict[str, Any], settings: Settings) -> None:
    assert detect_record_format(case["row"], "text", "x") == case["kind"]
    ((whole, answer),) = texts(written(settings, case["row"]))
    assert whole.endswith("What is 2 + 3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nIt is 5.")
    assert answer == "It is 5.<|eot_id|>"


@pytest.mark.parametrize("case", ROWS["read"], ids=lambda case: case["kind"])
def test_parse_conversation_reads_messages_calls_and_tools(case: dict[str, Any]) -> None:
    read = parse_conversation(case["row"], case["kind"], "x")
    assert isinstance(read, Conversation)
    assert [message["role"] for message in read.messages] == case["roles"]
    contents = [message.get("content") for message in read.messages]
    assert contents == case.get("contents", contents)
    calls = [call for message in read.messages for call in message.get("tool_calls", ())]
    assert calls == case.get("calls", []) and [*(read.tools or ())] == case.get("tools", [])
    assert read.num_prompt_messages == case.get("prompt", read.num_prompt_messages)


def test_prompt_and_completion_strings_are_plain_text(settings: Settings) -> None:
    assert parse_conversation(
        {"prompt": "a", "completion": "b"}, "prompt_completion", "x"
    ) == PlainCompletion(prompt="a", completion="b")
    ((whole, answer),) = texts(written(settings, {"prompt": "what is it", "completion": ", and more?"}))
    assert (whole, answer) == ("what is it, and more?", ", and more?<|end_of_text|>")


def test_json_list_and_lines_are_read_in_pieces(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records may be a list or lines, and pieces may have any size."""
    rows = [{"messages": GREETING}] * 6
    path = tmp_path / "chat.json"
    monkeypatch.setattr("portable.data.sources.rows.PIECE_CHARS", 7)
    for shape in (json.dumps(rows), json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        path.write_text(shape)
        assert texts(replace(settings, source=str(path)))[0][1] == "It is 5.<|eot_id|>"
        assert len(build_data(replace(settings, source=str(path))).train) == 6
    path.write_text(json.dumps(rows)[:-1])
    with pytest.raises(UserError, match="the file ends in the middle of the list of records"):
        build_data(replace(settings, source=str(path)))


def test_parquet_records_do_not_share_keys(settings: Settings, tmp_path: Path) -> None:
    def called(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        return {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    path = tmp_path / "chat.parquet"
    pq.write_table(pa.Table.from_pylist([called({"city": "Bern"}), called({"unit": 2})]), path)
    tokenizer("qwen2_5").save_pretrained(tmp_path / "qwen")
    given = replace(settings, source=str(path), tokenizer=str(tmp_path / "qwen"), seq_len=200)
    assert all("null" not in whole for whole, _ in texts(given))


def test_json_lone_surrogates_become_question_marks(settings: Settings) -> None:
    said = {"messages": [QUESTION, {**ANSWER, "content": "x\ud800"}], "tools": [{"name": "\ud800"}]}
    assert texts(written(settings, said))[0][1] == "x?<|eot_id|>"


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ROWS["second"], ids=lambda case: case["line"])
def test_conversation_error_names_line(case: dict[str, Any], settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        build_data(written(settings, {"messages": GREETING}, case["row"]))
    assert f"chat.jsonl:2: {case['line']}" in str(error.value) and "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]


def test_conversation_errors_are_listed_by_kind(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the lines of the first ten bad records and counts all by kind. ``skip`` drops them."""
    good, silent = {"messages": GREETING}, {"messages": [QUESTION]}
    empty = {"messages": [QUESTION, {"role": "assistant", "content": ""}]}
    typo = {"message": GREETING}
    lost = {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": "look"}]}]}
    source_settings = written(settings, good, *[silent] * 8, good, *[typo] * 4, empty, good)
    with Path(settings.source).open("a") as file:
        file.write('{"messages": [\n"text"\n')
    with pytest.raises(MultipleMistakesError) as error:
        build_data(source_settings)
    lines = error.value.lines
    assert [re.search(r"chat.jsonl:(\d+): ", line)[1] for line in lines[:10]] == [  # type: ignore[index]
        *map(str, range(2, 10)),
        *map(str, (11, 12)),
    ]
    assert (
        "14 bad records (8 x no message with role assistant has text to train on, "
        "4 x there is no field messages" in lines[10]
    )
    assert lines[10].endswith("correct or remove these records, or set data.on_bad_record to skip")
    skipping = replace(source_settings, on_bad_record="skip")
    data = build_data(skipping)
    assert len(data.train) == 4 and "14 bad records were skipped" in capsys.readouterr().err
    (line,) = data.sizes.warnings
    assert line.startswith("data.source: 1 answers are empty, so the model is trained to end its turn")
    # Records that the template cannot render.
    source_settings = written(settings, good, lost, good, lost)
    with pytest.raises(MultipleMistakesError) as error:
        build_data(source_settings)
    assert [line.count("leaves out the call of the tool 'look'") for line in error.value.lines[:2]] == [1, 1]
    assert "2 bad records (2 x the template leaves out the call of the tool '...')" in error.value.lines[2]
    assert len(build_data(replace(source_settings, on_bad_record="skip")).train) == 2
    with pytest.raises(
        UserError, match=r"chat.jsonl:2: .*leaves out the call .*or set data.on_bad_record to skip"
    ):
        build_data(written(settings, good, lost))


def test_skipping_remedy_is_given_if_bad_records_are_not_skipped(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each record has another mistake: in its JSON, in its fields, in a Parquet column, or in a template."""
    lost = {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": "look"}]}]}
    path = Path(settings.source)
    remedy = "or set data.on_bad_record to skip"
    for row in ("{", "[]", '{"messages": 1}', json.dumps(lost)):
        path.write_text("\n".join([json.dumps({"messages": GREETING}), row, "{}"][: 2 + (row == "{")]) + "\n")
        with pytest.raises(UserError) as error:
            build_data(settings)
        lines = error.value.lines if isinstance(error.value, MultipleMistakesError) else [str(error.value)]
        assert [remedy in line for line in lines] == [False] * (len(lines) - 1) + [True]
        build_data(replace(settings, on_bad_record="skip"))
        warned = capsys.readouterr().err
        assert "warning: skipped: " in warned and remedy not in warned
    texts = pa.array([b"good", b"\xff", b"also good"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts}), path.with_suffix(".parquet"))
    parquet_settings = replace(settings, source=str(path.with_suffix(".parquet")))
    with pytest.raises(
        UserError, match=rf"cannot be read \(not UTF-8\); correct or remove the row, {remedy}"
    ):
        build_data(parquet_settings)
    build_data(replace(parquet_settings, on_bad_record="skip"))
    warned = capsys.readouterr().err
    assert "(not UTF-8); correct or remove the row\n" in warned and remedy not in warned


def test_first_record_that_cannot_be_read_is_skipped(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """The format is then detected from the next record."""
    rows = [{"conversations": "[broken"}, {"conversations": json.dumps(GREETING)}]
    with pytest.raises(UserError, match=r"chat.jsonl:1: conversations is not valid JSON"):
        build_data(written(settings, *rows))
    assert len(build_data(replace(settings, on_bad_record="skip")).train) == 1
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning: skipped: " in line]
    assert len(warnings) == 1 and "on_bad_record" not in warnings[0]


def test_missing_text_field_is_reported_once(settings: Settings) -> None:
    with pytest.raises(UserError, match="no field 'body'") as error:
        build_data(written(settings, *[{"text": "a"}] * 9, text_field="body", format="text"))
    assert not isinstance(error.value, MultipleMistakesError)


@pytest.mark.parametrize("case", ROWS["first"], ids=lambda case: case["line"])
def test_conversation_settings_are_rejected_at_first_record(case: dict[str, Any], settings: Settings) -> None:
    with pytest.raises(UserError, match=re.escape(case["line"])) as error:
        build_data(written(settings, case["row"], **case.get("settings", {})))
    assert case.get("also", "") in str(error.value)
    assert ("text_field" in str(error.value)) == case.get("alone", False)


def test_tokenizer_without_chat_template_is_rejected(settings: Settings, tmp_path: Path) -> None:
    bare = pickle.loads(pickle.dumps(tokenizer("llama3")))  # noqa: S301
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    given = written(settings, {"messages": GREETING}, tokenizer=str(tmp_path / "bare"))
    for opening in (build_data, inspect_data_sizes):
        with pytest.raises(
            UserError,
            match=r"the tokenizer has no template; set data.chat_template to a file .* or to chatml",
        ):
            opening(given)
    # ChatML's tokens are not this tokenizer's, so that none of them would end an answer.
    with pytest.raises(UserError, match="no trained token ends an answer"):
        build_data(replace(given, chat_template="chatml"))


def test_answers_with_untrained_end_are_rejected(settings: Settings, tmp_path: Path) -> None:
    text = template("llama3_training").replace(
        "trim + '<|eot_id|>' }}\n        {%- endg", "trim }}\n        {%- endg"
    )
    text = text.replace("{%- endgeneration %}", "{%- endgeneration %}{{ '<|eot_id|>' }}")
    (tmp_path / "endless.jinja").write_text(text)
    given = written(settings, {"messages": GREETING}, chat_template=str(tmp_path / "endless.jinja"))
    with pytest.raises(
        UserError, match=r"the trained tokens end in 'It is 5.', and then comes '<\|eot_id\|>'"
    ):
        build_data(given)
    assert build_data(replace(given, train_on="all")).end_of_turn_token is not None


# -- templates -----------------------------------------------------------------------------------------------


def test_split_answers_keep_columns_of_record(settings: Settings, tmp_path: Path) -> None:
    """A warning reports that the template of Qwen 3 renders earlier turns differently from the last one."""
    tokenizer("qwen3").save_pretrained(tmp_path / "qwen3")
    rows = [{"messages": TALK, "n": 5}, {"messages": GREETING, "n": 6}]
    given = written(settings, *rows, tokenizer=str(tmp_path / "qwen3"), columns=("n",), seq_len=256)
    data = build_data(given)
    assert sorted(read_sample(data.train, at)["n"].item() for at in range(4)) == [5, 5, 5, 6]
    (line,) = data.sizes.warnings
    assert "1 of 2 conv" in line and inspect_data_sizes(given).warnings == [line]


def test_chat_template_date_is_fixed(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%Y-%m-%d') }} " + template("llama3"))
    given = written(settings, {"messages": GREETING}, chat_template=str(tmp_path / "dated.jinja"))
    assert texts(given)[0][0].startswith("2025-01-01 ")


def test_named_chat_template_is_saved_with_tokenizer(settings: Settings, tmp_path: Path) -> None:
    several = pickle.loads(pickle.dumps(tokenizer("llama3")))  # noqa: S301
    other = template("llama3").replace("trim", "upper | trim")
    several.chat_template = {"default": template("llama3"), "loud": other}
    several.save_pretrained(tmp_path / "several")
    given = written(settings, {"messages": GREETING}, tokenizer=str(tmp_path / "several"))
    assert texts(given)[0][1] == "It is 5.<|eot_id|>"
    loud = replace(given, chat_template="loud")
    assert texts(loud)[0][1] == "IT IS 5.<|eot_id|>"
    assert build_data(loud).tokenizer.chat_template == other


# -- truncation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kept", "warning"),
    [
        (
            "end",
            [0, 2, 3],
            r"1 of 4 samples is truncated at the end \(.* tokens? .*\); 1 of 4 samples is left out because",
        ),
        ("start", [0, 1, 2, 3], r"2 of 4 samples are truncated at the beginning \(.* tokens"),
        ("drop", [0, 3], "2 of 4 samples are left out because of their length"),
    ],
)
def test_truncation_warning_counts_samples(
    mode: Any, kept: list[int], warning: str, settings: Settings
) -> None:
    asks = [{"role": "user", "content": "what is it " * 40}, ANSWER]
    says = [QUESTION, {"role": "assistant", "content": "and more " * 40}]
    rows = [{"messages": talk} for talk in (GREETING, asks, says, GREETING)]
    given = written(settings, *rows, truncation=mode)
    data = build_data(given)
    (line,) = data.sizes.warnings
    assert re.search(f"^data.truncation: {warning}", line)
    assert inspect_data_sizes(given).warnings == [line]
    numbers = [data.train.list_document_numbers(index)[0] for index in range(len(data.train))]
    assert sorted(numbers) == kept
    answers = dict(zip(numbers, (answer for _, answer in texts(given)), strict=True))
    assert all(answers.values())
    assert mode != "start" or answers[1] == "It is 5.<|eot_id|>"


def test_truncation_that_leaves_out_every_pair_is_rejected(settings: Settings) -> None:
    """One answer of each pair is too long, so half of all answers would fit."""
    short, long = ([{"role": "assistant", "content": text}] for text in ("It is 5.", "and more " * 60))
    rows = [
        {"prompt": [QUESTION], "chosen": chosen, "rejected": rejected}
        for chosen, rejected in ((short, long), (long, short))
    ]
    pair_settings = replace(written(settings, *rows, truncation="drop"), format="preference")
    with pytest.raises(
        UserError, match=r"^data.truncation: all preference pairs are excluded, .*raise data.seq_len"
    ):
        build_data(pair_settings)


def test_truncation_of_every_answer_end_is_rejected(settings: Settings) -> None:
    """A model of such samples would never stop."""
    long = [QUESTION, {"role": "assistant", "content": "and more " * 60}]
    given = written(settings, {"messages": long}, {"messages": long})
    with pytest.raises(UserError, match=r"all samples are cut before '<\|eot_id\|>'.*raise data.seq_len"):
        build_data(given)
    assert len(build_data(replace(given, truncation="start")).train) == 2
    with pytest.raises(UserError, match="would not learn to stop"):
        inspect_data_sizes(given)
    assert len(build_data(written(settings, {"messages": long}, {"messages": GREETING})).train) == 2


# -- the cache and its processes -----------------------------------------------------------------------------


def test_packed_conversations_follow_masks(settings: Settings) -> None:
    given = written(settings, *[{"messages": TALK}] * 5, packing=True, seq_len=16)
    data = build_data(given)
    assert data.first_tokens is not None and data.train.valid_labels_per_sample is None
    ids, trained = (
        data.first_tokens.tokens["text"][:].astype(np.int64),
        data.first_tokens.read_trained_range(0, data.first_tokens.num_tokens),
    )
    assert trained is not None
    expected = [
        np.where(trained[at + 1 : at + 17], ids[at + 1 : at + 17], IGNORED_LABEL)
        for at in range(0, data.first_tokens.num_tokens - 16, 16)
    ]
    answered = [number for number, row in enumerate(expected) if (row != IGNORED_LABEL).any()]
    assert 0 < len(answered) < len(expected)
    assert [read_sample(data.train, index)["labels"].tolist() for index in range(len(data.train))] == [
        expected[number].tolist() for number in answered
    ]
    left_out = f"{len(expected) - len(answered):,} of {len(expected):,} samples are left out"
    assert left_out in data.sizes.warnings[0]
    sizes = inspect_data_sizes(given)
    assert (sizes.train_samples, sizes.warnings) == (len(answered), data.sizes.warnings)


def test_conversation_cache_does_not_depend_on_processes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n} what is it"}, ANSWER]} for n in range(60)]
    given = written(settings, *rows)
    alone = build_data(given)
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 200)
    monkeypatch.setattr(tokenizing, "_LOCAL_CHAT_BATCHES", 1)
    monkeypatch.setattr(tokenizing, "count_usable_cores", lambda: 2)
    others = build_data(replace(given, cache_dir=tmp_path / "elsewhere"))
    assert others.fingerprint == alone.fingerprint


@pytest.mark.parametrize("kind", ["conversations", "texts"])
def test_worker_process_tokenizes_without_other_processes(
    kind: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard of a stream is tokenized by a worker process, and the other cores have their own shards."""
    messages = [{"messages": [{"role": "user", "content": f"{n} what is it"}, ANSWER]} for n in range(60)]
    rows = messages if kind == "conversations" else [{"text": f"{n} what is it"} for n in range(60)]
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 200)
    for name in ("_LOCAL_CHAT_BATCHES", "_LOCAL_TEXT_BATCHES"):
        monkeypatch.setattr(tokenizing, name, 1)
    monkeypatch.setattr(tokenizing, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(parallel_map, "is_worker_process", True)
    monkeypatch.setattr(parallel_map, "WorkerProcess", Mock(side_effect=AssertionError))
    assert build_data(written(settings, *rows)).sizes.train_samples


def test_conversation_cache_build_resumes_after_kill(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data has several samples per record, skipped records, and masks that end within a byte."""
    rows = [{"messages": TALK}, {"messages": [QUESTION]}, {"messages": GREETING}] * 20
    changed = written(settings, *rows, on_bad_record="skip", split_turns=True)
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 200)
    monkeypatch.setattr(tokenizing, "_SAVE_SECONDS", 0)
    monkeypatch.setattr(tokenizing, "count_usable_cores", lambda: 1)
    build_data(replace(changed, cache_dir=tmp_path / "whole"))
    (whole,) = (tmp_path / "whole" / "tokens").glob("*/meta.json")
    warned = capsys.readouterr().err.count("warning: skipped")
    for number in (1, 2, 4):
        kill_build(number, partial(build_data, changed))
    build_data(changed)
    assert capsys.readouterr().err.count("warning: skipped") == warned
    (meta,) = (Path(str(changed.cache_dir)) / "tokens").glob("*/meta.json")
    assert tree(meta.parent) == tree(whole.parent)


def test_map_in_order_reports_errors_and_deaths() -> None:
    """Results are in order, and an error of the work or the death of a process is reported."""
    assert list(map_in_order(work, range(9), num_processes=1)) == [n * n for n in range(9)]
    assert list(map_in_order(work, range(3), num_processes=2, num_local_items=5)) == [0, 1, 4]
    found = map_in_order(work, [*range(5), -1, 7], num_processes=2, num_local_items=1)
    with pytest.raises(UserError, match="refused"):
        assert [next(found) for _ in range(5)] == [0, 1, 4, 9, 16] and next(found)
    with pytest.raises(RunError, match="a tokenization process ended with exit code -9"):
        list(map_in_order(work, [1, -2, 3], num_processes=2))
    with pytest.raises(RunError, match=r"a tokenization process failed \(OSError: no room\)"):
        list(map_in_order(work, [1, -3], num_processes=2))


# -- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run that learns three answers by heart."""
    folder = tmp_path_factory.mktemp("learned")
    names = {"red": "apples", "blue": "the sky", "green": "grass"}
    rows = [
        {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": said}]}
        for name, said in names.items()
    ]
    source = write_jsonl(folder / "chat.jsonl", rows * 8)
    config = configured(
        folder / "run",
        source,
        model__config={**TINY_MODEL, "vocab_size": 300},
        data__vocab_size=300,
        data__seq_len=32,
        data__eval_fraction=0,
        train__steps=100,
        train__learning_rate=1e-2,
        train__global_batch_size=12,
        train__micro_batch_size=12,
        log__every_steps=50,
        log__sample_prompt="blue",
        log__sample_tokens=20,
        checkpoint__every_steps=None,
    )
    assert config.data.format == "auto"
    assert run_rank("cpu", config) == 0
    return folder


def said(folder: Path) -> str:
    """Return the answer of a model with its saved tokenizer, template and end token."""
    found = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "blue"}]
    prompt = found.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    text: str = found.decode(answer)
    return text


def test_conversation_model_learns_to_stop(learned: Path) -> None:
    final = learned / "run" / "final"
    stops = json.loads((final / "generation_config.json").read_text())["eos_token_id"]
    assert stops[0] == transformers.AutoTokenizer.from_pretrained(final).convert_tokens_to_ids("<|im_end|>")
    assert said(final) == "the sky<|im_end|>"
    resolved = load_config(learned / "run" / "config.yaml")
    assert (resolved.data.format, resolved.data.packing) == ("messages", "documents")


def test_merged_adapter_stops_like_adapter(learned: Path, tmp_path: Path) -> None:
    """The base model stops only at the end of a text. The run or the converter merges the adapter."""
    base = tmp_path / "base"
    shutil.copytree(learned / "run" / "final", base)
    generation = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 0}))
    assert said(base).startswith("the sky<|im_end|>\n")  # and on
    config = configured(
        tmp_path / "run",
        learned / "chat.jsonl",
        model__config=None,
        model__name_or_path=str(base),
        adapter__type="lora",
        data__vocab_size=None,
        data__seq_len=32,
        data__eval_fraction=0,
        train__steps=2,
        checkpoint__every_steps=None,
        checkpoint__export="merged",
    )
    assert run_rank("cpu", config) == 0
    merged = tmp_path / "merged"
    checkpoint = str(next((tmp_path / "run" / "checkpoints").glob("step-*")))
    assert convert([checkpoint, str(merged), "--merge-into", str(base), "--quiet"]) == 0
    assert said(tmp_path / "run" / "final") == said(merged) == "the sky<|im_end|>"


def test_show_data_marks_trained_text(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(
        settings,
        {"messages": SYSTEM + TALK},
        {"messages": [QUESTION, {"role": "assistant", "content": "\x1b[2J"}]},
    )
    given = tiny(
        tmp_path / "run",
        tmp_path / "chat.jsonl",
        data__tokenizer=settings.tokenizer,
        data__seq_len=128,
        data__eval_fraction=0,
        model__config={**TINY_MODEL, "vocab_size": 512, "max_position_embeddings": 128},
    )
    assert main([*flags(given), "--show-data", "2"]) == 0
    shown = capsys.readouterr().out
    # Packed conversations are shown one by one, with a line between them.
    assert sorted(re.findall(r"--- sample \d, from document (\d):", shown)) == ["0", "1"]
    assert "[[It is 5.<|eot_id|>]]<|start_header_id|>user" in shown
    assert "[[\\x1b[2J<|eot_id|>]]" in shown and "\x1b" not in shown
    assert "Be brief.<|eot_id|>" in shown


@pytest.mark.parametrize(("family", "packing"), [("smolvlm", "false"), ("qwen2_5_vl", "documents")])
def test_show_data_and_report_show_images(
    family: str, packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes and numbers of tokens of images are shown, instead of hundreds of placeholders."""
    pytest.importorskip("torchvision")
    model = write_image_model(tmp_path / family, family)
    chats = write_squares(tmp_path / "squares", 8, sizes=((16, 16), (40, 24)))
    more = {"model__config": None, "model__name_or_path": str(model), "data__packing": packing}
    config = tiny(tmp_path / "run", chats, data__seq_len=128, data__eval_fraction=0, **more)
    assert main([*flags(config), "--show-data", "8"]) == 0
    shown = capsys.readouterr().out
    sizes = re.findall(r"\[image (\d+x\d+), (\d+) tokens\]", shown)
    assert {size for size, _ in sizes} == {"16x16", "40x24"} and len(sizes) == 7
    (facts,) = re.findall(r"  images  +(.*)", shown)
    mean = sum(int(tokens) for _, tokens in sizes) / 7
    assert facts == f"7, {mean:.1f} tokens per image"
    assert "<image>" not in shown and "<|image_pad|>" not in shown and "[[red" in shown
    assert run_rank("cpu", load_config(None, config)) == 0
    assert re.search(
        rf"  images +7 images in 6 conversations, {mean:.1f} tokens per image", capsys.readouterr().err
    )
    page = (tmp_path / "run" / "report.html").read_text()
    preview = json.loads((tmp_path / "run" / "data_samples.json").read_text())
    pieces = [piece for sample in preview["samples"] for piece in sample["pieces"]]
    urls = [url for _, _, url in pieces if url]
    assert urls and "img-src data:" in page and all(url in page for url in urls)
    for url in urls:
        picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        assert picture.format == "JPEG" and max(picture.size) <= 96


def raise_run_error(reason: str) -> None:
    raise RunError(reason)


def test_worker_process_keeps_message_of_run_error() -> None:
    reason = "data.source: s3://b/a.jsonl: the store is away; run the command again"
    with parallel_map.WorkerProcess(raise_run_error) as worker:
        worker.send_item(reason)
        with pytest.raises(RunError, match=f"^{reason}$"):
            worker.receive_result()
