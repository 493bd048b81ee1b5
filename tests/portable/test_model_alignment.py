"""Special tokens, classes and decoder starts have the same meaning as in transformers and its Trainer."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    MBartTokenizer,
    NllbTokenizer,
)
from transformers.trainer_utils import align_special_tokens

from portable.config import RunConfig
from portable.config.sections import ModelConfig
from portable.data.samples.base import LAST_LABEL
from portable.data.samples.classes import ModelClasses, map_labels_to_class_ids
from portable.data.samples.order import EpochIndex
from portable.errors import UserError
from portable.model.build import build_model_on_meta, load_model_config
from portable.model.labels import find_known_classes
from portable.model.special_tokens import ModelSpecialTokens
from portable.run.batches import build_train_loader
from portable.run.checkpointing import write_model_files
from portable.run.rank import run_rank
from tests.parity import opened
from tests.portable.data_support import read_sample, write_jsonl
from tests.portable.test_data_tokenizer import word_tokenizer
from tests.runs import TINY_MODEL, configured
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.usefixtures("brief_runs")

LLAMA = {key: value for key, value in TINY_MODEL.items() if key != "model_type"} | {"num_hidden_layers": 1}
ROWS = yaml.safe_load(Path(__file__).with_name("model_alignment_rows.yaml").read_text("utf-8"))
SIZES = ROWS["sizes"]
WORDS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
"""A Llama's: no padding token."""


def pretrained(folder: Path, tokenizer: Any, kind: Any = AutoModelForCausalLM, **config: Any) -> Path:
    """Save a tiny model with a tokenizer by ``save_pretrained``."""
    torch.manual_seed(0)
    settings = LLAMA if config.get("model_type", "llama") == "llama" else {}
    model = kind.from_config(AutoConfig.for_model(**({"model_type": "llama"} | settings | config)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_of(model: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> RunConfig:
    """Build the config of a run that trains a pretrained model on `rows`, in a folder next to the model."""
    folder = model.parent
    named = {"model__config": None, "model__name_or_path": str(model), "train__warmup_steps": 0}
    return configured(
        folder / "run",
        write_jsonl(folder / "rows.jsonl", rows),
        **named,
        **{"train__micro_batch_size": 6} | settings,
    )


TEXT = [{"text": " ".join("abcd"[(i * j) % 4] for j in range(1, 4 + i % 9))} for i in range(40)]


@pytest.mark.parametrize("packing", [True, False])
def test_end_token_used_as_padding_is_trained(packing: bool, tmp_path: Path) -> None:
    """Packed documents are separated by the end token.

    Transformers builds the model first and aligns it then.
    """
    tokenizer = word_tokenizer("<s> $A", **WORDS, pad_token="</s>")
    folder = pretrained(tmp_path / "model", tokenizer, bos_token_id=1, eos_token_id=2)
    config = run_of(folder, TEXT, data__packing=packing, data__seq_len=8, train__micro_batch_size=2)
    with opened(config) as trial:
        batch = trial.run.data.train.build_batch([EpochIndex(0, i) for i in range(2)])
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        align_special_tokens(theirs, tokenizer)
        logits = theirs(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        expected = theirs.get_input_embeddings().weight.grad
        mine = copy.deepcopy(trial.run.model)
        logits = mine(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        found = mine.get_input_embeddings().weight.grad
        assert float(expected[2].norm()) > 1e-4
        assert torch.allclose(found, expected, atol=1e-6)
        assert trial.run.model.config.pad_token_id == trial.run.model_config.pad_token_id == 2
        assert mine.get_input_embeddings().padding_idx is None


def aligned(
    folder: Path | None, tokenizer: Any, task: str = "causal-lm", **settings: Any
) -> tuple[Any, Any, list[str]]:
    """Return the model, the config to save and the notes, without a run."""
    chosen: Any = {"name_or_path": str(folder), "config": None} if folder else {"config": settings}
    chosen = ModelConfig(task=task, **chosen)  # type: ignore[arg-type]
    config = load_model_config(chosen)
    special = ModelSpecialTokens(config, chosen)
    special.replace_default_ids(tokenizer)
    model = build_model_on_meta(config, chosen)
    return model, config, special.align_token_ids(model, tokenizer)


@pytest.mark.parametrize("ids", ROWS["ids"], ids=str)
@pytest.mark.parametrize(
    ("generation", "padded"), [({}, True), ({"eos_token_id": [5, 2], "top_k": 7, "do_sample": True}, False)]
)
def test_special_tokens_of_pretrained_model_match_trainer(
    ids: dict[str, Any], generation: dict[str, Any], padded: bool, tmp_path: Path
) -> None:
    tokenizer = word_tokenizer("<s> $A", **WORDS, **({"pad_token": "<pad>"} if padded else {}))
    folder = pretrained(tmp_path / "model", tokenizer, **ids)
    if generation:
        GenerationConfig(**generation).save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    before = theirs.generation_config.to_dict(), theirs.config.to_dict()
    align_special_tokens(theirs, tokenizer)
    model, config, notes = aligned(folder, tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        expected = getattr(theirs.config, name)
        assert getattr(model.config, name) == getattr(config, name) == expected, name
        mine, stops = getattr(model.generation_config, name), getattr(theirs.generation_config, name)
        assert mine == stops or [mine] == stops, name
    assert model.generation_config.top_k == theirs.generation_config.top_k
    assert model.generation_config.do_sample == theirs.generation_config.do_sample
    if theirs.config.to_dict() != before[1]:
        assert notes


def test_generation_config_keeps_end_tokens_and_sampling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several end tokens, and a generation config that transformers would refuse to save changed."""
    tokenizer = word_tokenizer("<s> $A", **WORDS, pad_token="<pad>")
    folder = pretrained(tmp_path / "model", tokenizer, bos_token_id=1, eos_token_id=5)
    told = {"eos_token_id": [5, 6], "temperature": 0.5, "do_sample": False, "max_length": 17}
    (folder / "generation_config.json").write_text(json.dumps(told))
    config = run_of(
        folder,
        TEXT,
        data__seq_len=4,
        data__packing=False,
        train__steps=1,
        log__sample_tokens=0,
    )
    assert run_rank("cpu", config) == 0
    assert "eos_token_id 5 -> 2" in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    found = model.generation_config
    assert found.eos_token_id == [2, 5, 6]
    assert (found.temperature, found.max_length) == (0.5, 17)


@pytest.mark.parametrize(("kind", "task"), [("gemma3", "causal-lm"), ("t5gemma", "seq2seq-lm")])
def test_special_tokens_are_set_in_nested_configs(kind: str, task: str) -> None:
    """The classes of nested configs default to padding id 0, which is the end token here.

    The row of the end token would not be trained.
    """
    tokenizer = word_tokenizer("$A </s>", eos_token="</s>", bos_token="<s>", unk_token="<u>", pad_token="<p>")
    assert tokenizer.eos_token_id == 0
    model, config, notes = aligned(None, tokenizer, task, model_type=kind, **SIZES[kind])
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.padding_idx is not None]
    assert tables and all(table.padding_idx == tokenizer.pad_token_id for table in tables)
    for part in (config.get_text_config(), model.config.get_text_config(), model.generation_config):
        assert part.eos_token_id == tokenizer.eos_token_id
    assert not notes


# -- decoder starts


@pytest.mark.parametrize("kind", ["bart", "mbart", "pegasus", "marian", "plbart", "t5"])
def test_decoder_start_matches_label_shift_of_model(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **SIZES[kind])
    if "decoder_start_token_id" in SIZES[kind]:
        config.decoder_start_token_id = SIZES[kind]["decoder_start_token_id"]
    model: Any = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = word_tokenizer("$A </s>", **WORDS, pad_token="<pad>")
    settings = ModelConfig(name_or_path=str(tmp_path), config=None, task="seq2seq-lm")
    found = ModelSpecialTokens(load_model_config(settings), settings).compute_decoder_start(tokenizer)
    labels = torch.tensor([[20, 21, 22, 2]])
    decoder = [labels[0, -1] if found == LAST_LABEL else found, *labels[0, :-1]]
    inputs = {"input_ids": torch.tensor([[30, 31, 2]])}
    with torch.no_grad():
        expected = model(**inputs, labels=labels).logits
        logits = model(**inputs, decoder_input_ids=torch.tensor([decoder])).logits
    assert torch.equal(logits, expected)
    assert (found == LAST_LABEL) == (kind in ("mbart", "plbart"))


# -- classes


KNOWN = {name: ModelClasses("model.name_or_path", tuple(names)) for name, names in ROWS["known"].items()}


@pytest.mark.parametrize("row", ROWS["classes"], ids=str)
def test_map_labels_to_class_ids_uses_classes_of_model(row: dict[str, Any]) -> None:
    given = row["labels"], row.get("declared"), KNOWN.get(row.get("known"))
    if "refused" in row:
        with pytest.raises(UserError, match=f"^data.label_field: .*{row['refused']}"):
            map_labels_to_class_ids(*given)
        return
    found = map_labels_to_class_ids(*given)
    assert (list(found.output_names), list(found.output_ids)) == (row["names"], row["ids"])


def learns(folder: Path, labels: Sequence[Any], **given: Any) -> Any:
    """Open the run of a BERT on texts with these labels."""
    rows = [{"text": "a b c d"[: 1 + 2 * (i % 4)], "label": label} for i, label in enumerate(labels)]
    config = configured(
        folder / "run",
        write_jsonl(folder / "rows.jsonl", rows),
        model__config={"model_type": "bert", **SIZES["bert"], "vocab_size": 384, **given},
        model__task="sequence-classification",
        data__seq_len=8,
        data__eval_fraction=0,
        train__global_batch_size=2,
        train__micro_batch_size=2,
    )
    return opened(config)


SINGLE, MULTI = "single_label_classification", "multi_label_classification"


@pytest.mark.parametrize("row", ROWS["problems"], ids=str)
def test_classifier_problem_type_follows_config_or_labels(row: dict[str, Any], tmp_path: Path) -> None:
    """The labels have the form that ``forward(labels=)`` of transformers expects.

    The losses are equal.
    """
    labels, given, problem, outputs = row["labels"], row.get("config", {}), row["problem"], row["outputs"]
    with learns(tmp_path, labels, **given) as trial:
        data, model = trial.run.data, trial.run.model.eval()
        names = data.label_names
        assert (data.classes.problem_type, model.config.num_labels) == (problem, outputs)
        for index in range(len(labels)):
            label, found = (
                labels[data.train.list_document_numbers(index)[0]],
                read_sample(data.train, index)["labels"],
            )
            if problem == SINGLE:
                expected: Any = names.index(str(label))
            elif problem == MULTI and not any(isinstance(item, bool | float) for item in label):
                named = [item if isinstance(item, int) else names.index(item) for item in label]
                expected = [float(output in named) for output in range(outputs)]
            else:
                expected = label
            assert found.dtype == (torch.int64 if problem == SINGLE else torch.float32)
            assert torch.equal(found, torch.tensor(expected).to(found.dtype))
        batch = next(iter(build_train_loader(trial.run, 0)))
        with torch.no_grad():
            loss = model(**batch).loss
        assert float(trial.step().loss) == pytest.approx(float(loss), rel=1e-5)
        write_model_files(trial.run, tmp_path / "final")
        told = [line for line in trial.run.notes if "problem_type" in line]
        assert bool(told) == (problem != SINGLE and "problem_type" not in given)
    saved = AutoConfig.from_pretrained(tmp_path / "final")
    assert saved.num_labels == outputs
    assert saved.problem_type == (None if problem == SINGLE else problem)


@pytest.mark.parametrize("row", ROWS["refused"], ids=lambda row: row["line"])
def test_classifier_rejects_unusable_labels(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^(data\.label_field|model\.config): .*{row['line']}"):
        learns(tmp_path, row["labels"], **row.get("config", {})).__enter__()


def test_find_known_classes_needs_trained_head_or_config(tmp_path: Path) -> None:
    """Only a model with a trained head, or whose config names them, has known classes."""
    config = AutoConfig.for_model(
        "bert", **SIZES["bert"], id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    task: Any = {"task": "sequence-classification"}
    head = ModelConfig(name_or_path=str(tmp_path), config=None, **task)
    found = find_known_classes(load_model_config(head), head)
    assert found is not None and found.names == ("no", "yes")
    scratch = ModelConfig(name_or_path=str(tmp_path), config=None, init="scratch", **task)
    assert find_known_classes(load_model_config(scratch), scratch) is None
    bare = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    assert find_known_classes(load_model_config(head), head) is None


@pytest.mark.parametrize("pad", [None, "</s>", "<pad>"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "xlnet"])
def test_pretrained_classifier_keeps_classes_and_reads_last_token(
    family: str, pad: str | None, tmp_path: Path
) -> None:
    """Loss and class of each text match transformers on only that text, without padding."""
    tokenizer = word_tokenizer("", **WORDS, **({} if pad is None else {"pad_token": pad}))
    names = {0: "POSITIVE", 1: "NEGATIVE"}
    shape = {**SIZES.get(family, LLAMA), "id2label": names, "label2id": {"POSITIVE": 0, "NEGATIVE": 1}}
    config = AutoConfig.for_model(family, **shape)
    torch.manual_seed(0)
    theirs = AutoModelForSequenceClassification.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [row | {"label": ("positive", "negative")[i % 2]} for i, row in enumerate(TEXT)]
    given = run_of(tmp_path / "model", rows, model__task="sequence-classification", data__seq_len=16)
    with opened(given) as trial:
        data, model = trial.run.data, trial.run.model.eval()
        assert data.label_names == ("POSITIVE", "NEGATIVE")
        batch = data.train.build_batch([EpochIndex(0, i) for i in range(6)])
        with torch.no_grad():
            together = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            for row in range(6):
                document = data.train.list_document_numbers(row)[0]
                assert names[int(batch["labels"][row])].casefold() == rows[document]["label"]
                ids = tokenizer(rows[document]["text"], return_tensors="pt")["input_ids"]
                alone = theirs(input_ids=ids).logits  # of a batch of one: at the last token
                assert torch.allclose(together[row], alone[0], atol=1e-6)
        fill = batch["input_ids"][batch["attention_mask"] == 0].unique().tolist()
        assert fill == [data.tokenizer.pad_token_id] == [model.config.pad_token_id]
        assert trial.run.model_config.pad_token_id == fill[0]
        assert trial.run.model_config.label2id == {"POSITIVE": 0, "NEGATIVE": 1}


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_classifier_texts_end_with_end_token(kind: str, tmp_path: Path) -> None:
    """The trained tokenizer ends texts like the model's original one.

    A tokenizer that does not is rejected.
    """
    rows = [row | {"label": i % 2} for i, row in enumerate(TEXT)]
    given = configured(
        tmp_path / "run",
        write_jsonl(tmp_path / "rows.jsonl", rows),
        model__config=tiny_config(kind),
        model__task="sequence-classification",
        data__seq_len=4,
        train__micro_batch_size=6,
    )
    with opened(given) as trial:
        model = trial.run.model
        batch = next(iter(build_train_loader(trial.run, 0)))
        assert (batch["input_ids"] == model.config.eos_token_id).sum(1).tolist() == [1] * 6
        expected = model(**batch).loss.detach()
        assert float(trial.step().loss) == pytest.approx(float(expected), rel=1e-5)
        write_model_files(trial.run, tmp_path / "final")
    again = AutoTokenizer.from_pretrained(tmp_path / "final")
    bare = again("a b", add_special_tokens=False)["input_ids"]
    assert again("a b")["input_ids"] == [*bare, again.eos_token_id]
    word_tokenizer("", **WORDS, pad_token="<pad>").save_pretrained(tmp_path / "bare")
    endless = given.replaced({"data.tokenizer": str(tmp_path / "bare")})
    with pytest.raises(UserError, match=r"data\.tokenizer: the tokenizer does not add an eos_token to texts"):
        opened(endless).__enter__()


@pytest.mark.parametrize("kind", ["m2m_100", "mbart"])
def test_translation_model_starts_with_target_language(kind: str, tmp_path: Path) -> None:
    """The loss equals ``forward(labels=)`` of transformers, and the config is saved as in its examples."""
    letters = chr(0x2581) + "abcd"
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    own: Any
    if kind == "m2m_100":
        languages = {"source": "eng_Latn", "target": "deu_Latn"}
        vocab = special | {letter: 4 + i for i, letter in enumerate(letters)}
        own = NllbTokenizer(vocab=vocab, merges=[])
    else:
        languages = {"source": "en_XX", "target": "de_DE"}
        own = MBartTokenizer()
    config = AutoConfig.for_model(kind, **SIZES["bart"] | {"vocab_size": len(own), "dropout": 0.0})
    torch.manual_seed(0)
    theirs: Any = AutoModelForSeq2SeqLM.from_config(config)
    theirs.save_pretrained(tmp_path / "model")
    own.save_pretrained(tmp_path / "model")
    given = run_of(
        tmp_path / "model",
        [row | {"target": row["text"][::-1]} for row in TEXT],
        model__task="seq2seq-lm",
        data__source_language=languages["source"],
        data__target_language=languages["target"],
        data__seq_len=8,
        train__steps=1,
    )
    with opened(given) as trial:
        data = trial.run.data.train
        batch = data.build_batch([EpochIndex(0, i) for i in range(6)])
        tokens = AutoTokenizer.from_pretrained(
            tmp_path / "model", src_lang=languages["source"], tgt_lang=languages["target"]
        )
        for row in range(6):
            text = TEXT[data.list_document_numbers(row)[0]]["text"]
            expected = tokens(text, text_target=text[::-1], truncation=True, max_length=8)
            ids, labels = batch["input_ids"][row], batch["labels"][row]
            assert ids[batch["attention_mask"][row] == 1].tolist() == expected["input_ids"]
            assert labels[labels != -100].tolist() == expected["labels"]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        with torch.no_grad():
            logits = trial.run.model.eval()(**inputs).logits
            del inputs["decoder_input_ids"]
            truth = theirs.eval()(**inputs, labels=batch["labels"]).logits
        counted = batch["labels"] != -100
        assert torch.allclose(logits[counted], truth[counted], atol=1e-5)
        write_model_files(trial.run, tmp_path / "final")
    german = own.convert_tokens_to_ids(languages["target"])
    saved = GenerationConfig.from_pretrained(tmp_path / "final")
    if kind == "m2m_100":
        assert (saved.decoder_start_token_id, saved.forced_bos_token_id) == (2, german)
    else:
        assert saved.decoder_start_token_id == german
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert tokenizer("a", text_target="a")["labels"].count(german) == 1
