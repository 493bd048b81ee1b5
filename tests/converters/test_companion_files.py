"""Conversion copies the small files of a model, except weights, training state, logs, and custom code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from portable.converters import config_and_tokenizer_files as files
from portable.converters.cli import main
from tests.tiny_models import tiny_model

COPIED = {
    "LICENSE",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "source.spm",
    "speaker_embeddings.json",
    "video_preprocessor_config.json",
    "words.txt",
}
EXCLUDED = {
    "modeling_own.py": files.CUSTOM_CODE,
    "custom_generate/generate.py": files.CUSTOM_CODE,
    "custom_generate/requirements.txt": files.CUSTOM_CODE,
    "mm_projector.bin": files.OTHER_WEIGHTS,
    "non_lora_trainables.bin": files.OTHER_WEIGHTS,
    "v_head.safetensors": files.OTHER_WEIGHTS,
    "training_args.bin": "weights",
    "pytorch_model.bin": "weights",
    "events.out.tfevents.1": "a log",
    "trainer_state.json": "training state",
    "adapter_config.json": "training state",
    ".gitattributes": "hidden",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    tiny_model("llama").save_pretrained(folder)
    for name in ("additional_chat_templates", "custom_generate", "speech_decoder", "checkpoint-10", "onnx"):
        (folder / name).mkdir()
    for name in {*COPIED, *EXCLUDED} - {"config.json", "generation_config.json"}:
        (folder / name).write_text("{}")
    return folder


def list_written_files(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return names - {"model.safetensors"}


def test_convert_copies_small_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), str(tmp_path / "out")]) == 0
    assert list_written_files(tmp_path / "out") == COPIED
    messages = capsys.readouterr().err
    excluded = {**EXCLUDED, "model.safetensors": "weights", "speech_decoder/": "a folder"}
    assert files.find_excluded_files(model) == excluded
    (note,) = [line for line in messages.splitlines() if line.startswith("note: not copied: ")]
    assert note.endswith("; add --trust-remote-code to copy the code")
    for name, reason in excluded.items():
        assert (f"{name} ({reason})" in note) == (
            reason in (files.CUSTOM_CODE, files.OTHER_WEIGHTS, "a folder")
        )
    # The same conversion may replace an output with such files, but another conversion may not.
    assert main([str(model), str(tmp_path / "out"), "--overwrite", "--trust-remote-code", "--quiet"]) == 0
    assert list_written_files(tmp_path / "out") == COPIED | {
        name for name, reason in EXCLUDED.items() if reason == files.CUSTOM_CODE
    }
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    assert main([str(tmp_path / "plain"), str(tmp_path / "out"), "--overwrite", "--quiet"]) == 2
    assert "that no conversion has written" in capsys.readouterr().err


def test_config_from_copies_small_files(model: Path, tmp_path: Path) -> None:
    dcp_save({"model": get_model_state_dict(tiny_model("llama"))}, checkpoint_id=tmp_path / "dcp")
    argv = [str(tmp_path / "dcp"), str(tmp_path / "out"), "--quiet", "--config-from", str(model)]
    assert main(argv) == 0
    assert list_written_files(tmp_path / "out") == COPIED
    assert main([*argv, "--overwrite"]) == 0


def test_convert_copies_sentence_transformers_modules(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    modules = [
        {"path": ""},
        {"path": "1_Pooling"},
        {"path": "2_Dense"},
        {"path": "../other"},
        {"path": 3},
        "x",
    ]
    (base / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Dense", "3_Unlisted"):
        (base / name).mkdir()
        (base / name / "config.json").write_text("{}")
    (base / "2_Dense" / "model.safetensors").write_bytes(b"dense")
    assert main([str(base), str(tmp_path / "out"), "--quiet"]) == 0
    assert (tmp_path / "out" / "2_Dense" / "model.safetensors").read_bytes() == b"dense"
    assert {"modules.json", "1_Pooling/config.json"} <= list_written_files(tmp_path / "out")
    assert "3_Unlisted/config.json" not in list_written_files(tmp_path / "out")


def test_convert_does_not_copy_external_links_and_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    (tmp_path / "secret.txt").write_text("secret")
    (base / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (base / "words.txt").symlink_to("config.json")
    (base / "table.dat").write_bytes(bytes(1000))
    monkeypatch.setattr(files, "MAX_SMALL_FILE", 500)
    assert main([str(base), str(tmp_path / "out")]) == 0
    assert list_written_files(tmp_path / "out") == {"config.json", "generation_config.json"}
    messages = capsys.readouterr().err
    assert (
        "notes.txt (a link to a path outside the folder)" in messages and "table.dat (larger than" in messages
    )


def test_limit_of_copied_files_does_not_apply_to_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    for name in ("a.txt", "b.txt", "z.txt"):
        (base / name).write_text("")
    monkeypatch.setattr(files, "_MAX_SMALL_FILES", 2)
    assert main([str(base), str(tmp_path / "out")]) == 0
    written = {"a.txt", "b.txt", "config.json", "generation_config.json"}
    assert list_written_files(tmp_path / "out") == written
    assert "z.txt (at most 2 files are copied)" in capsys.readouterr().err


def test_merge_copies_small_files_of_base(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    (model / "adapter_config.json").unlink()
    trained = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    torch.nn.init.ones_(next(p for name, p in trained.named_parameters() if "lora_B" in name))
    trained.save_pretrained(tmp_path / "adapter")
    argv = [str(tmp_path / "adapter"), str(tmp_path / "out"), "--merge-into", str(model), "--quiet"]
    assert main(argv) == 0
    assert list_written_files(tmp_path / "out") == COPIED | {"merged_adapters.json"}
