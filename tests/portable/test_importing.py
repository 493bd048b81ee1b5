"""``portable-train import``: another program's file becomes a config, or a line says what is missing."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from portable.cli import main
from portable.commands.importing import import_files
from portable.config import RunConfig, keys, load_config
from portable.config.importing.deepspeed import UNSUPPORTED
from portable.config.importing.importer import PROGRAMS, read
from portable.config.importing.rows import File, Row
from portable.config.origins import Origin
from portable.config.yaml_text import Document, parse
from portable.errors import UserError
from tests.portable.test_hints import config, remedies

if TYPE_CHECKING:
    from pathlib import Path

TABLE = keys.settings(RunConfig)
TRL = """\
model_name_or_path: org/model
dataset_name: org/chats
dataset_train_split: train_sft
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 2.0e-04
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_steps: -1
num_train_epochs: 2
adam_beta2: 0.95
bf16: yes
use_peft: true
lora_r: 8
lora_target_modules: [q_proj, v_proj]
load_in_4bit: true
eval_strategy: epoch
save_strategy: steps
save_steps: 50
report_to: none
logging_steps: 5
push_to_hub: true
hub_model_id: me/mine
hub_strategy: every_save
"""
AXOLOTL = """\
base_model: org/model
datasets:
  - {path: org/alpaca, type: alpaca}
  - {path: mine.jsonl, ds_type: json, type: chat_template, field_messages: conversations,
     message_field_role: from}
sequence_len: 2048
sample_packing: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
saves_per_epoch: 2
val_set_size: 0.05
evals_per_epoch: 4
plugins: [axolotl.integrations.liger.LigerPlugin]
wandb_watch:
"""
FACTORY = """\
model_name_or_path: org/model
stage: dpo
finetuning_type: lora
lora_rank: 4
lora_target: all
pref_beta: 0.2
pref_ftx: 0.5
dataset: org/pairs
template: llama3
cutoff_len: 1024
output_dir: out
per_device_train_batch_size: 1
learning_rate: 5.0e-6
num_train_epochs: 3.0
"""
TORCHTUNE = """\
output_dir: /tmp/out
model: {_component_: torchtune.models.llama3.qlora_llama3_8b, lora_attn_modules: [q_proj, output_proj],
  apply_lora_to_mlp: true, lora_rank: 8, lora_alpha: 16}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/t.model, max_seq_len: 512}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/model,
  output_dir: "${output_dir}"}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: true}
batch_size: 2
gradient_accumulation_steps: 8
epochs: 1
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, fused: true}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup,
  num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
dtype: bf16
device: cpu
metric_logger: {log_dir: "${output_dir}/logs"}
"""
DEEPSPEED = {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}},
    "bf16": {"enabled": True},
}
ACCELERATE = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 4
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_offload_params: false}
"""


def imported(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The settings that are printed, by dotted key, and the text."""
    import_files(words)
    text = capsys.readouterr().out
    load_config(_parsed(text))
    return dict(_flat(_parsed(text))), text


def _parsed(text: str) -> dict[str, Any]:
    return parse(text, "run.yaml").value  # type: ignore[no-any-return]


def _flat(tree: dict[str, Any], around: str = "") -> Any:
    for name, value in tree.items():
        key = around + name
        if key in TABLE:
            yield key, value
        else:
            yield from _flat(value, f"{key}.")


FILES: dict[str, tuple[str, str]] = {
    "TRL": (
        TRL,
        """\
model.name_or_path: org/model, data.source: org/chats, data.split: train_sft, data.packing: false, seed: 42,
train.global_batch_size: 8, train.micro_batch_size: 4, train.schedule: cosine, train.epochs: 2,
train.min_learning_rate_ratio: 0.1, train.betas: [0.9, 0.95], train.warmup_steps: 0, train.weight_decay: 0.0,
adapter.type: lora, adapter.r: 8, adapter.base: nf4, adapter.dropout: 0.05, precision: bf16,
adapter.target_modules: [q_proj, v_proj], checkpoint.every_steps: 50, log.trackers: [],
hub.push: checkpoints, hub.repo: me/mine""",
    ),
    "axolotl": (
        AXOLOTL,
        """\
data.sources: [{name: alpaca, source: org/alpaca, split: train, format: alpaca},
  {name: mine-jsonl, source: mine.jsonl, split: train, format: sharegpt}],
data.seq_len: 2048, data.packing: documents, data.eval_fraction: 0.05, train.eval_every_epochs: 0.25,
adapter.base: nf4, adapter.r: 32, adapter.target_modules: all-linear, train.global_batch_size: 8,
train.optimizer: adamw_8bit, train.warmup_ratio: 0.03, checkpoint.every_epochs: 0.5""",
    ),
    "LLaMA-Factory": (
        FACTORY,
        """\
train.loss: "dpo(beta=0.2, sft=0.5)", data.format: preference, data.source: org/pairs, adapter.alpha: 8,
train.global_batch_size: 1, train.schedule: linear""",
    ),
    "torchtune": (
        TORCHTUNE,
        """\
model.name_or_path: /tmp/model, adapter.base: nf4, data.source: yahma/alpaca-cleaned, data.train_on: all,
adapter.target_modules: [q_proj, o_proj, gate_proj, up_proj, down_proj], data.packing: documents,
train.global_batch_size: 16, train.learning_rate: 3e-4, train.warmup_steps: 100, backend: cpu,
train.max_grad_norm: null""",
    ),
    "DeepSpeed": (
        json.dumps(DEEPSPEED),
        """\
strategy: zero3, train.micro_batch_size: 4, train.global_batch_size: 8, precision: bf16,
train.learning_rate: 1e-4, train.betas: [0.9, 0.99], memory.offload_params: cpu,
deepspeed.config: {zero_optimization: {overlap_comm: true, offload_param: {pin_memory: true}}}""",
    ),
    "Accelerate": (
        ACCELERATE,
        "strategy: shard_grad_op, precision: bf16, memory.offload_params: none",
    ),
}


@pytest.mark.parametrize("program", FILES)
def test_a_file_of_each_program(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, given = FILES[program]
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    found, printed = imported(str(path), capsys=capsys)
    expected = _parsed(f"{{{given}}}")
    assert {key: found.get(key) for key in expected} == expected
    for line in printed.splitlines():
        if re.match(r" *[a-z_]+: .", line):
            told = r"  # (.*theirs.yaml:\d+: |default of |micro-batch |a loss of pairs)"
            assert re.search(told, line), line


@pytest.mark.parametrize("key", ["context_parallel_size", "tensor_parallel_size"])
def test_devices_that_share_a_sequence_or_a_layer_take_one_batch(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "axolotl.yaml"
    theirs = AXOLOTL.replace("qlora", "lora").replace("paged_adamw_8bit", "adamw_torch")
    file.write_text(f"{theirs}\n{key}: 2\n")
    counts = []
    for given in (theirs, file.read_text()):
        file.write_text(given)
        assert main(["import", str(file), "--devices", "4"]) == 0
        counts.append(yaml.safe_load(capsys.readouterr().out)["train"]["global_batch_size"])
    assert counts[1] == counts[0] // 2


def test_several_files_and_a_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(ACCELERATE)
    script = ["train.py", "--model_name_or_path", "org/model", "--dataset-name=org/data", "--bf16", "True"]
    more = "--per_device_train_batch_size 2 --learning_rate 1e-5 --lora_target_modules a b"
    found, printed = imported(str(tmp_path / "a.yaml"), "--", *script, *more.split(), capsys=capsys)
    assert found["train.global_batch_size"] == 8  # on the four devices of Accelerate's file
    assert found["strategy"] == "shard_grad_op" and found["train.learning_rate"] == 1e-5
    assert "# command line:0: " not in printed and "# command line: learning_rate" in printed


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (FACTORY.replace("org/pairs", "identity,alpaca_en_demo"), "data.source: the files name no data"),
        (TRL.replace("model_name_or_path: org/model\n", ""), "model.name_or_path: the files name no model"),
        ("a: 1\n", "not a config of torchtune, axolotl"),
        ("- 1\n", "not a config of torchtune, axolotl"),
    ],
)
def test_what_is_missing_is_named(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    assert main(["import", str(path)]) == 2
    assert line in capsys.readouterr().err


DECAY = {"total_num_steps": 50, "warmup_type": "linear"}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gradient_clipping": 0}, {"train.max_grad_norm": None}),
        ({"fp16": {"enabled": False}}, {"precision": "fp32"}),
        ({"optimizer": ADAMW}, {"train.weight_decay": 0.0, "train.betas": [0.9, 0.999]}),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.8}}}, {"train.betas": [0.8, 0.95]}),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"total_num_steps": 50, "warmup_type": "linear"},
                }
            },
            {
                "train.steps": 50,
                "train.warmup_steps": 1000,
                "train.learning_rate": 0.001,
                "train.schedule_params": {"warmup_type": "linear"},
            },
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "cpu_offload": True}},
            {"memory.offload_optimizer": "cpu", "memory.offload_params": None},
        ),
        ({"bf16": {"enabled": 1}}, {"precision": "bf16"}),
        ({"bf16": {"enabled": 0}}, {"precision": "fp32"}),
        ({"fp16": {"enabled": "t", "hysteresis": 3}}, {"precision": "fp16", "fp16.hysteresis": 3}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": 1}}, {"memory.offload_optimizer": "cpu"}),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": 1}}}, {"train.weight_decay": 0.01}),
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_json_means_what_it_means_to_deepspeed(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """What a launch takes from it is compared with DeepSpeed's parser, by the same table."""
    found = read(Document({"zero_optimization": {"stage": 3}, "train_batch_size": 8, **given}, {}), "ds.json")
    assert not found.refused
    assert {key: found.values.get(key) for key in expected} == expected


def test_a_json_with_comments_and_tabs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n\t// why\n\t"_why": 1, "zero_optimization": {"stage": 2,},\n\t"train_batch_size": 8,\n}'
    )
    found, _ = imported(str(path), capsys=capsys)
    assert (found["strategy"], found["train.global_batch_size"]) == ("zero2", 8)


def test_what_a_json_must_not_say() -> None:
    given = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "prescale_gradients": True,
        "optimizer": {"type": "AdamW", "params": {"bias_correction": False, "amsgrad": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1.0, 2.0], "last_batch_iteration": 3}},
    }
    refused = "\n".join(read(Document({"train_batch_size": 8, **given}, {}), "ds.json").refused)
    for name in (
        "check_grad_overflow",
        "prescale",
        "bias_correction",
        "amsgrad",
        "warmup_max_lr",
        "last_batch",
    ):
        assert name in refused


def test_a_default_of_a_program_yields_to_what_another_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**DEEPSPEED, "optimizer": ADAMW}))
    (tmp_path / "trl.yaml").write_text("model_name_or_path: org/model\ndataset_name: a\nweight_decay: 0.2\n")
    files = [str(tmp_path / name) for name in ("ds.json", "trl.yaml")]
    for names in (files, files[::-1]):
        found, _ = imported(*names, capsys=capsys)
        assert found["train.learning_rate"] == 1e-4  # and not TRL's default
        assert found["train.weight_decay"] == 0.2  # and not DeepSpeed's


@pytest.mark.parametrize("value", [True, 1, -1, 0, 0.5, "x", "", None, [], ["x"], {}, {"x": 1}], ids=repr)
def test_no_value_of_any_key_is_a_traceback(value: Any) -> None:
    for program in PROGRAMS:
        start = dict.fromkeys((program.sure.split() or program.some.split())[:2], None)
        for name in program.rows:
            found = read(Document({**start, **_tree(name, value)}, {}), "theirs.yaml")
            assert all("\n" not in line for line in (*found.refused, *found.notes))


def _tree(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    tree: dict[str, Any] = value
    return tree


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_remedy_can_be_followed(program: Any) -> None:
    """Each says to leave a key out, which value to give it, or which settings load in its place."""
    for name, row in program.rows.items():
        if row.free or row.to or row.how is not None or not row.why:
            continue
        given = list(remedies(row.why.replace("set it to", "make it")))
        for settings in given:
            config(settings)
        told = [
            word
            for word in re.findall(r"[a-z]+\.[a-z_]+", row.why)
            if word.split(".")[0] in keys.sections(RunConfig)
        ]
        assert all(key in TABLE or key.startswith("model.config") for key in told), row.why
        if (value := re.search(r"set it to (\w+)", row.why)) is not None:
            assert _refusals(program, name, yaml.safe_load(value[1])) == []
        plain = re.search(
            r"leave it out|remove it|remove the key|\bonly\b|name (another|modules)|put a "
            "system|--accelerate",
            row.why,
        )
        assert given or told or value or plain or "section" in row.why or name in UNSUPPORTED, row.why
        assert _refusals(program, name, ["something"]), name


def _refusals(program: Any, name: str, value: Any) -> list[str]:
    file = File(
        program.name,
        _tree(name, value),
        program.rows,
        lambda path: Origin(".".join(path), 0),
        lambda file, value: None,
    )
    file.take()
    return file.result.refused


def test_each_setting_that_a_row_names_is_there() -> None:
    for program in PROGRAMS:
        for name, row in program.rows.items():
            assert isinstance(row, Row)
            assert row.to in TABLE or not row.to, name
    with pytest.raises(UserError, match="import: no file; name one"):
        import_files([])
