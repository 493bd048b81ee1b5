"""What is known of GPUs by their names. None is needed."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from gpu import device_specs as devices
from portable.errors import UserError
from portable.model.flops import shape_hints


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA RTX A4000", None),
        ("Some other card", None),
    ],
)
def test_peaks(name: str, bf16: float | None) -> None:
    assert devices.peak_flops(name, "bf16") == (None if bf16 is None else pytest.approx(bf16 * 1e12))
    assert devices.peak_flops(name, "fp32") is None


@pytest.mark.parametrize(
    ("capability", "precision", "multiple"),
    [
        ((9, 0), "bf16", 64),
        ((8, 0), "bf16", 64),
        ((8, 0), "tf32", 32),
        ((8, 9), "bf16", 8),
        ((7, 0), "fp16", 8),
        ((7, 0), "bf16", None),
        ((9, 0), "fp32", None),
    ],
)
def test_multiples(capability: tuple[int, int], precision: str, multiple: int | None) -> None:
    assert devices.shape_multiple(capability, precision) == multiple


def test_hints() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=50257, n_embd=96)
    hints = shape_hints(config, tokens=4 * 100, multiple=64, precision="bf16")
    assert [hint.split(", ")[0] for hint in hints] == [
        "hint: model.config.vocab_size is 50257",
        "hint: model.config.hidden_size is 96",
        "hint: train.micro_batch_size x data.seq_len is 400",
    ]
    assert hints[0].endswith("50304")
    assert len(shape_hints(config, tokens=400, multiple=8, precision="bf16")) == 1
    assert shape_hints(config, tokens=3, multiple=None, precision="fp32") == []


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in devices.BOUND_BY_SRUN:
        monkeypatch.delenv(name, raising=False)
    assert devices.index(7, 8) == 7
    with pytest.raises(UserError, match="local rank 3 has no GPU; this process sees 1"):
        devices.index(3, 1)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")  # each task sees one, and calls it 0
    assert devices.index(3, 1) == 0
