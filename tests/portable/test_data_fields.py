"""Fields of a record: pairs of texts, nested fields, prefixes, and a separate length for targets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from portable.data.dataset import build_data, inspect_data_sizes
from portable.data.sources.datasets_library import iter_csv_rows
from portable.data.sources.records import Fields
from portable.errors import UserError
from tests.portable.data_support import Settings, read_sample, replace, word_level, write_jsonl

WORDS = [f"w{number}" for number in range(40)]
KINDS = yaml.safe_load(Path(__file__).with_name("tokenizer_kinds.yaml").read_text("utf-8"))["pairs"]


def tokenizer_of(folder: Path, kind: str) -> Any:
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    tokenizer = word_level([*special.values(), "a", "b", *WORDS], **KINDS[kind], **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def pairs(count: int) -> list[dict[str, Any]]:
    chosen = random.Random(0)

    def text(most: int) -> str:
        return " ".join(chosen.choices(WORDS, k=chosen.randint(1, most)))

    return [{"text": text(12), "other": text(12), "label": i % 12} for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_len", [6, 8, 13, 40])
def test_text_pairs_match_tokenizer(tmp_path: Path, kind: str, seq_len: int) -> None:
    tokenizer = tokenizer_of(tmp_path / "tok", kind)
    rows = pairs(60)
    settings = Settings(
        source=str(write_jsonl(tmp_path / "pairs.jsonl", rows)),
        text_pair_field="other",
        tokenizer=str(tmp_path / "tok"),
        vocab_size=None,
        seq_len=seq_len,
        eval_fraction=0.0,
        cache_dir=tmp_path / "cache",
    )
    data = build_data(settings, task="sequence-classification", pad_left=kind == "xlnet")
    for index in range(60):
        row = rows[data.train.list_document_numbers(index)[0]]
        theirs = tokenizer(
            row["text"],
            row["other"],
            truncation="longest_first",
            max_length=seq_len,
            padding="max_length",
            return_tensors="pt",
        )
        ours = read_sample(data.train, index)
        assert int(ours.pop("labels")) == row["label"]
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], theirs[name][0]) for name in ours)
    for look in (build_data, inspect_data_sizes):
        with pytest.raises(UserError, match=r"data.seq_len: [234] is too small for a pair"):
            look(replace(settings, seq_len=2), task="sequence-classification")


TRANSLATIONS = [{"translation": {"en": f"w{i % 9} w3 w4", "de": "w7 " * (1 + i % 5)}} for i in range(30)]


def translations(tmp_path: Path, **more: Any) -> Settings:
    tokenizer_of(tmp_path / "tok", "bert")
    values = {
        "source": str(write_jsonl(tmp_path / "pairs.jsonl", TRANSLATIONS)),
        "text_field": "translation.en",
        "target_field": "translation.de",
        "tokenizer": str(tmp_path / "tok"),
        "vocab_size": None,
        "packing": False,
        "eval_fraction": 0.0,
        "cache_dir": tmp_path / "cache",
    }
    return Settings(**(values | more))


def test_nested_fields_prefix_and_target_length_match_tokenizer(tmp_path: Path) -> None:
    settings = translations(tmp_path, source_prefix="w1 w2 : ", seq_len=8, target_seq_len=4)
    data = build_data(settings, task="seq2seq-lm", decoder_start_token_id=7)
    lengths = set()
    for index in range(30):
        row = TRANSLATIONS[data.train.list_document_numbers(index)[0]]["translation"]
        text, target = f"w1 w2 : {row['en']}", row["de"]
        sample = read_sample(data.train, index)
        theirs = data.tokenizer(text, truncation=True, max_length=8, padding="max_length")
        assert sample["input_ids"].tolist() == theirs["input_ids"]
        theirs = data.tokenizer(target, truncation=True, max_length=4, padding="max_length")
        kept = sum(theirs["attention_mask"])
        assert sample["labels"].tolist() == theirs["input_ids"][:kept] + [-100] * (4 - kept)
        assert sample["decoder_input_ids"].shape == (4,)
        assert sample["decoder_input_ids"][:kept].tolist() == [7, *theirs["input_ids"][: kept - 1]]
        lengths.add(kept)
    assert lengths == {3, 4}


def test_field_with_dot_precedes_nested_field(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"a.b": "w1 w2 w3", "a": {"b": "w9"}}])
    settings = translations(tmp_path, source=str(source), text_field="a.b", target_field="a.b", seq_len=8)
    data = build_data(settings, task="seq2seq-lm")
    assert (
        data.tokenizer.decode(read_sample(data.train, 0)["input_ids"], skip_special_tokens=True) == "w1 w2 w3"
    )


def test_classifier_with_two_text_fields_is_rejected(tmp_path: Path) -> None:
    """Reading only the first text would train on half of each record."""
    rows = [
        {"premise": "a b", "hypothesis": "b", "label": 1},
        {"premise": "a", "hypothesis": "c", "label": 0},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        UserError, match=r"field to read, and for pairs of texts, set data\.text_pair_field to the field"
    ):
        build_classifier_data(path, tmp_path)


# -- labels, blank records and rendered texts ---------------------------------------------------------------

PANDAS = {
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "parquet": lambda frame, path: frame.to_parquet(path),
    "csv": lambda frame, path: frame.to_csv(path, index=False),
}


def build_classifier_data(path: Path, folder: Path, **more: Any) -> Any:
    """Return the data of a classifier."""
    values: dict[str, Any] = {"source": str(path), "seq_len": 8, "vocab_size": 300, "eval_fraction": 0.0}
    return build_data(
        Settings(**(values | {"cache_dir": folder / "cache"} | more)), task="sequence-classification"
    )


@pytest.mark.parametrize("suffix", PANDAS)
def test_integer_labels_are_classes_in_every_file_type(suffix: str, tmp_path: Path) -> None:
    """A missing label makes pandas store the others as floats."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": [f"text {i}" for i in range(12)], "label": [i % 3 for i in range(12)]})
    frame.loc[5, "label"] = None
    path = tmp_path / f"a.{suffix}"
    PANDAS[suffix](frame, path)
    data = build_classifier_data(path, tmp_path, on_bad_record="skip")
    assert data.classes.problem_type == "single_label_classification" and data.label_names == ("0", "1", "2")
    assert data.first_tokens.num_documents == 11


CELLS: dict[str, tuple[list[str], tuple[str, ...] | str]] = {
    "codes": (["00A"] * 3 + ["101"] * 3, ("00A", "101")),
    "leading zeros": (["007", "010", "101"], ("007", "010", "101")),
    "words for nothing": (["None", "NA", "null", "yes"], ("NA", "None", "null", "yes")),
    "numbers and NA": (["0", "1", "NA"], ("0", "1", "NA")),
    "two spellings of a number": (["1.0", "1", "+2", "2e0"], ("1", "2")),
    "names with digits": (["1.5-turbo", "3.5", "4"], ("1.5-turbo", "3.5", "4")),
    "booleans": (["True", "False"], ("False", "True")),
    "negative": (["-1", "1"], ("-1", "1")),
    "fractions": (["0.5", "1.5", "2"], "regression"),
    "fractions and nan": (
        ["0.5", "1.5", "nan"],
        "'nan' is not a number, but other labels are decimal numbers",
    ),
    "one fraction": (["0", "1"] * 10 + ["1.5"], "1 of 21 labels has a fraction, such as 1.5"),
    "empty": (["0", "", "1"], "row 2: 'label' is null, not a class"),
}


@pytest.mark.parametrize("header", ["\ntext,label", " \ntext,label", "text,label,label", ",label,text"])
def test_cells_of_any_header_are_strings(header: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    names = header.strip().split(",")
    path.write_text(header + "\n" + (",".join(["007"] * len(names)) + "\n") * 2)
    rows = [located.row for located in iter_csv_rows(path, "a.csv", Fields(label="label"))]
    assert len(rows) == 2 and all(cell == "007" for row in rows for cell in row.values())


@pytest.mark.parametrize("cells", CELLS)
def test_label_kind_depends_on_all_cells(cells: str, tmp_path: Path) -> None:
    labels, wanted = CELLS[cells]
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"text {i},{label}\n" for i, label in enumerate(labels)))
    if isinstance(wanted, tuple):
        data = build_classifier_data(path, tmp_path)
        assert data.label_names == wanted
        names = [data.label_names[int(read_sample(data.train, i)["labels"])] for i in range(len(labels))]
        texts = [data.train.list_document_numbers(i)[0] for i in range(len(labels))]
        spelled = [labels[number] for number in texts]
        same = [
            name == label or float(name) == float(label) for name, label in zip(names, spelled, strict=True)
        ]
        assert all(same)
    elif wanted == "regression":
        assert build_classifier_data(path, tmp_path).classes.problem_type == "regression"
    else:
        with pytest.raises(UserError, match=wanted):
            build_classifier_data(path, tmp_path)


def test_csv_fraction_and_json_string_are_classes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,0.5\nb,0.5\n")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "c", "label": "good"}, {"text": "d", "label": "good"}])
    assert build_classifier_data(tmp_path, tmp_path / "cache").label_names == ("0.5", "good")


def test_label_kind_is_the_same_in_later_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [("a", "00A")] * 10_000 + [("008", "101")] * 100
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    data = build_classifier_data(path, tmp_path)
    assert data.label_names == ("00A", "101") and data.first_tokens.num_documents == 10_100


@pytest.mark.parametrize(
    ("task", "rows", "note"),
    [
        ("causal-lm", [{"text": ""}, {"text": "a b c d"}], "1 record is left out, because 'text' is blank"),
        (
            "seq2seq-lm",
            [{"text": "a", "target": ""}, {"text": " ", "target": "b"}, {"text": "a", "target": "b"}],
            "2 records are left out, because 'text' or 'target' is blank",
        ),
        (
            "sequence-classification",
            [{"text": "", "label": 0}, {"text": "a", "label": 0}, {"text": "b", "label": 1}],
            "1 record is left out, because 'text' is blank",
        ),
    ],
)
def test_blank_records_are_counted_in_warning(
    task: str, rows: list[dict[str, Any]], note: str, tmp_path: Path
) -> None:
    """The warning appears also if the tokens are already cached, and for evaluation data."""
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    held_out = write_jsonl(tmp_path / "eval.jsonl", [*rows, rows[-1]])
    evaluated: Any = {"source": str(held_out)}
    settings = Settings(
        source=str(train), seq_len=2, packing=False, eval_fraction=0.0, cache_dir=tmp_path / "cache",
        eval=evaluated, target_field="target",
    )  # fmt: skip
    for _ in range(2):
        warnings = build_data(settings, task=task).sizes.warnings
        assert [warning for warning in warnings if "left out" in warning] == [
            f"{path}: {note}" for path in (train, held_out)
        ]


@pytest.mark.parametrize(
    ("task", "row", "tokens"),
    [
        ("causal-lm", {"text": "<s> a b"}, [0, 2, 3, 1]),
        ("causal-lm", {"text": "<s> a b </s>"}, [0, 2, 3, 1]),
        ("causal-lm", {"text": "a b"}, [0, 2, 3, 1]),
        ("causal-lm", {"text": "a <s> b"}, [0, 2, 0, 3, 1]),
        ("causal-lm", {"text": "<s> <s> b"}, [0, 0, 3, 1]),  # the user's own
        ("masked-lm", {"text": "<s> a b"}, [0, 2, 3, 1]),
        ("causal-lm", {"prompt": "<s> a", "completion": " b"}, [0, 2, 3, 1]),
    ],
)
def test_rendered_text_has_one_bos_token(
    task: str, row: dict[str, Any], tokens: list[int], tmp_path: Path
) -> None:
    names = ["<s>", "</s>", "a", "b", "<unk>", "<mask>"]
    tokenizer = word_level(
        names, "<s> $A </s>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>"
    )
    tokenizer.save_pretrained(tmp_path / "tok")
    settings = Settings(
        source=str(write_jsonl(tmp_path / "a.jsonl", [row])),
        tokenizer=str(tmp_path / "tok"),
        vocab_size=None,
        packing=False,
        format="prompt_completion" if "prompt" in row else "text",
        eval_fraction=0.0,
        cache_dir=tmp_path / "cache",
    )
    assert build_data(settings, task=task).first_tokens.read_document("text", 0).tolist() == tokens
