"""Packed conversations with images: the same loss and gradients as conversations in separate samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from portable.data.dataset import build_data
from portable.data.samples.order import EpochIndex
from portable.errors import UserError
from portable.model.document_attention import IMAGE_PACKING_TYPES, explain_image_mixing
from portable.model.image_forward import install_image_forward
from portable.model.loss import compute_summed_cross_entropy
from tests.image_models import OTHER_PROCESSORS, PROCESSORS, write_image_model, write_squares
from tests.runs import checked

pytest.importorskip("torchvision")
FAMILIES = PROCESSORS.keys() | OTHER_PROCESSORS.keys()
PACKED = sorted(IMAGE_PACKING_TYPES & FAMILIES)
SIZES = ((16, 16), (24, 16), (16, 32))


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("squares"), 12, sizes=SIZES)


def compute_loss_and_gradients(folder: Path, source: Path, cache: Path, packing: Any) -> Any:
    """Return the summed loss of all samples, its gradients, and the number of samples."""
    from transformers import AutoModelForImageTextToText

    model = install_image_forward(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32))
    model.config.get_text_config().use_cache = False  # as in a run
    settings = {
        "source": str(source),
        "seq_len": 160,
        "packing": packing,
        "images": True,
        "eval_fraction": 0.0,
        "cache_dir": str(cache),
    }
    model_settings = {"name_or_path": str(folder), "config": None}
    config = checked(None, {"model": model_settings, "data": settings, "backend": "cpu"})
    data = build_data(config.data, model_tokenizer=str(folder))
    total = torch.zeros(())
    for start in range(0, len(data.train), 3):
        indices = [EpochIndex(0, index) for index in range(start, min(start + 3, len(data.train)))]
        total = total + compute_summed_cross_entropy(model, data.train.build_batch(indices))
    total.backward()
    gradients = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return total.item(), gradients, len(data.train)


@pytest.mark.parametrize("model_type", PACKED)
def test_packed_images_have_loss_and_gradients_of_separate_samples(
    model_type: str, squares: Path, tmp_path: Path
) -> None:
    folder = write_image_model(tmp_path / "model", model_type)
    loss, gradients, count = compute_loss_and_gradients(folder, squares, tmp_path / "cache", False)
    packed_loss, packed_gradients, packed = compute_loss_and_gradients(
        folder, squares, tmp_path / "cache", "documents"
    )
    assert packed < count
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    assert packed_gradients.keys() == gradients.keys()
    # A softmax does not depend on the biases of keys, so their gradients are only rounding errors.
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        difference = (packed_gradients[name] - gradient).norm()
        assert difference < 1e-6 * largest + 1e-5 * gradient.norm(), name
    assert any("vis" in name for name in gradients)


@pytest.mark.parametrize("model_type", sorted(FAMILIES - IMAGE_PACKING_TYPES))
def test_packing_of_images_is_off_for_other_models(model_type: str) -> None:
    assert explain_image_mixing(model_type) is not None


def test_concatenated_images_are_rejected() -> None:
    with pytest.raises(UserError, match=r"data\.packing: true would split images; set data\.packing"):
        checked(None, {"data": {"source": "a.jsonl", "format": "messages", "images": True, "packing": True}})
