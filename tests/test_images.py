"""Images in conversations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision")

from portable.reporting.metrics import read_metrics
from tests.engines import ENGINES, Engines
from tests.image_models import PROCESSORS, write_image_model, write_squares
from tests.parity import launched, numbers_of
from tests.runs import configured

SIZES = ((16, 16), (24, 16), (9, 31), (40, 12), (30, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: write_image_model(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("squares"), sizes=SIZES)


def image_run(folder: Path, source: Path, data: Path, **settings: Any) -> Any:
    return configured(
        folder,
        data,
        **{
            "model__config": None,
            "model__name_or_path": str(source),
            "data__seq_len": 128,
            "data__packing": False,
            "train__steps": 3,
            "train__global_batch_size": 4,
            "train__micro_batch_size": 2,
            "train__trainable": ["."],
            "train__dropout": False,
            "checkpoint__every_steps": None,
            "checkpoint__export": False,
            "log__sample_tokens": 0,
            **settings,
        },
    )


NAMES = [name for name in ENGINES if not name.startswith(("xla", "tpu")) and "shared" not in name]


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("name", NAMES)
def test_ranks(name: str, family: str, model: Any, squares: Path, tmp_path: Path, engines: Engines) -> None:
    one = image_run(tmp_path / "one", model(family), squares, strategy="no_shard")
    two = image_run(tmp_path / "two", model(family), squares, **ENGINES[name].settings)
    expected = numbers_of(engines, 1, one)
    found = numbers_of(engines, 4 if "hybrid" in name else 2, two.replaced({"train.micro_batch_size": 1}))
    print(name, family, max(abs(a - b) for a, b in zip(expected, found, strict=True)), len(found))
    assert found == pytest.approx(expected, abs=1e-5)
