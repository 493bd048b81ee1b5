"""Properties of GPUs by their names. No GPU is needed."""

from __future__ import annotations

import pytest

from portable.errors import UserError
from portable.gpu import device_specs as devices


@pytest.mark.parametrize(
    ("name", "bf16", "fp16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 989.4),
        ("NVIDIA H100 PCIe", 756.0, 756.0),
        ("NVIDIA A10G", 70.0, 70.0),
        ("NVIDIA A10", 125.0, 125.0),
        ("Tesla V100-SXM2-16GB", None, 125.0),
        ("Tesla T4", None, 65.0),
        ("Some other card", None, None),
    ],
)
def test_get_peak_flops_by_gpu_name(name: str, bf16: float | None, fp16: float | None) -> None:
    for precision, peak in (("bf16", bf16), ("fp16", fp16)):
        expected = None if peak is None else pytest.approx(peak * 1e12)
        assert devices.get_peak_flops(name, precision) == expected
    assert devices.get_peak_flops(name, "fp32") is None


def test_choose_gpu_index_gives_each_rank_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in devices.SRUN_BINDING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert devices.choose_gpu_index(7, 8) == 7
    with pytest.raises(
        UserError, match="local rank 3 has no GPU, because the number of GPUs that this process sees is 1"
    ):
        devices.choose_gpu_index(3, 1)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")  # each task sees one, and calls it 0
    assert devices.choose_gpu_index(3, 1) == 0
