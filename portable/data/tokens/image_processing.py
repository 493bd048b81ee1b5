"""Convert images to tokens and tensors with the model's Hugging Face processor.

A chat template writes one placeholder per image. The processor replaces the placeholder with a text
that contains the image tokens. The number of image tokens depends only on the size of the image.
The tensors of an image, such as its patches, are computed when a batch is built. This module
contains no code for specific model families: :class:`ImageProcessor` only calls the processor.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from portable.batch import BLANK_PREFIX
from portable.data.images import ImageFile, ImageSize, decode_image
from portable.errors import UserError, to_one_line
from portable.hub_requests import read_hub_once_per_node
from portable.untrusted_settings import CONFIG_FILE, TOKENIZER_FILES, check_downloaded_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Names of the files whose settings ``AutoProcessor.from_pretrained`` passes to the classes of a
processor."""
_BLANK_SIZE = ImageSize(64, 64)
_LARGEST_SIDE, _SMALLEST_SIDE = 4096, 16
"""Largest and smallest side in pixels that :meth:`ImageProcessor.find_largest_square` tries."""
_TEXT_COLUMNS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_TYPE_COLUMNS = ("mm_token_type_ids", "token_type_ids")
"""Names of the column that marks the image tokens in ``input_ids`` with 1, in order of preference."""


class ImageProcessor:
    """Adapter that converts the images of conversations with the processor of a model.

    The constructor runs the processor on a blank image. Unpickling calls the constructor again.

    Args:
        processor: Transformers processor that has an image processor and a tokenizer.

    Raises:
        ValueError: If the processor does not report the text with which it replaces an image
            placeholder.
        Exception: If the processor fails for the blank image. The type depends on the processor.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._compute_replacement = lru_cache(maxsize=1 << 14)(self._compute_uncached_replacement)
        blank = self._run([_make_blank_image(_BLANK_SIZE)], return_text_replacement_offsets=True)
        if "text_replacement_offsets" not in blank:
            raise ValueError(
                f"{type(processor).__name__} does not return the text that replaces an image placeholder"
            )
        self._type_column = next(
            (name for name in _TYPE_COLUMNS if name in blank and np.asarray(blank[name]).any()), None
        )
        self._blank_columns = {
            f"{BLANK_PREFIX}{name}": values for name, values in self._select_image_columns(blank).items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageProcessor, (self._processor,)

    @property
    def cache_key(self) -> str:
        """Text for cache keys that contains all settings of the processor."""
        return str(self._processor.to_json_string())

    @property
    def placeholder(self) -> str:
        """Text that a chat template writes for each image."""
        return str(self._processor.image_token)

    @property
    def image_token_ids(self) -> list[int]:
        """Ids of all tokens that may occur in the text that replaces an image placeholder."""
        return [int(token) for token in self._processor.image_token_ids if token is not None]

    @property
    def chat_template(self) -> Any:
        """Chat template of the processor, or None if it has none."""
        return getattr(self._processor, "chat_template", None)

    def list_missing_tokens(self, tokenizer: Any) -> list[str]:
        """List the image tokens that another tokenizer lacks or maps to different ids.

        Args:
            tokenizer: Transformers tokenizer to compare with the processor's tokenizer.

        Returns:
            Texts of the tokens.
        """
        texts = self._processor.tokenizer.convert_ids_to_tokens(self.image_token_ids)
        ids = tokenizer.convert_tokens_to_ids(texts)
        return [
            text
            for text, token, expected in zip(texts, ids, self.image_token_ids, strict=True)
            if token != expected
        ]

    def compute_replacement(self, size: ImageSize) -> str:
        """Return the text that replaces the placeholder of an image of the given size.

        Raises:
            Exception: If the processor does not support the size. The type depends on the processor.
        """
        return self._compute_replacement(size)

    def _compute_uncached_replacement(self, size: ImageSize) -> str:
        outputs = self._run([_make_blank_image(size)], return_text_replacement_offsets=True)
        ((replacement,),) = outputs["text_replacement_offsets"]
        return str(replacement["replacement"])

    def build_columns(
        self, files: Sequence[ImageFile], input_ids: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]]:
        """Build the image columns of a batch.

        Args:
            files: Content and size of each image file, ordered by row and then by token position.
            input_ids: Tokens of the batch, int64 ``[batch, tokens]``.

        Returns:
            Model arguments, keyed by name. The arguments include the image tensors, whose first
            dimension is not the batch dimension. A batch without images gets the tensors of a
            blank image instead, with names that begin with :data:`BLANK_PREFIX`. If the processor
            returns a column that marks image tokens, it is also included. Its shape is int64
            ``[batch, tokens]``.

        Raises:
            Exception: If an image file is damaged. The type depends on the damage.
        """
        columns: dict[str, npt.NDArray[Any]] = {}
        if self._type_column is not None:
            columns[self._type_column] = np.isin(input_ids, self.image_token_ids).astype(np.int64)
        if not files:
            return {**columns, **self._blank_columns}
        outputs = self._run([decode_image(data, size) for data, size in files])
        return {**columns, **self._select_image_columns(outputs)}

    def build_blank_columns(self, sizes: Sequence[ImageSize]) -> dict[str, npt.NDArray[Any]]:
        """Build the tensors of blank images.

        Args:
            sizes: Size of each image.

        Returns:
            Tensors, keyed by the name of the model argument.
        """
        return self._select_image_columns(self._run([_make_blank_image(size) for size in sizes]))

    def count_tokens(self, sizes: Sequence[ImageSize], token: int | None = None) -> int:
        """Count the tokens that images take in one conversation.

        Args:
            sizes: Size of each image.
            token: Id of the tokens to count. None counts all image tokens.
        """
        outputs = self._run([_make_blank_image(size) for size in sizes])
        return int(np.isin(outputs["input_ids"], self.image_token_ids if token is None else [token]).sum())

    def is_independent_of_other_images(self, sizes: Sequence[ImageSize]) -> bool:
        """Return whether the number of tokens of an image is independent of the other images.

        The method counts the tokens of all images in one conversation, and compares them with the
        sum over separate conversations of one image each.

        Args:
            sizes: Size of each image.
        """
        return self.count_tokens(sizes) == sum(self.count_tokens([size]) for size in sizes)

    def find_largest_square(self, max_tokens: int, max_pixels: int | None = None) -> ImageSize | None:
        """Find the approximate size of the largest square image that satisfies the limits.

        Only sides between 16 and 4096 pixels are tried.

        Args:
            max_tokens: Maximum number of image tokens.
            max_pixels: Maximum number of pixels. None for no further limit.

        Returns:
            The size. None if no tried size satisfies the limits.
        """
        side = _LARGEST_SIDE if max_pixels is None else min(_LARGEST_SIDE, isqrt(max_pixels))
        while side >= _SMALLEST_SIDE:
            size = ImageSize(side, side)
            if self.count_tokens([size]) <= max_tokens:
                return size
            side = side * 4 // 5
        return None

    def _run(self, images: list[Image], **options: Any) -> Mapping[str, Any]:
        """Run the processor on the images, with a text that contains only their placeholders."""
        outputs: Mapping[str, Any] = self._processor(
            text=[self.placeholder * len(images)], images=[images], return_tensors="np", **options
        )
        return outputs

    def _select_image_columns(self, outputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Select the outputs of the processor that belong to images instead of text."""
        return {
            name: np.asarray(values)
            for name, values in outputs.items()
            if name not in (*_TEXT_COLUMNS, "text_replacement_offsets")
        }


def _make_blank_image(size: ImageSize) -> Image:
    from PIL import Image

    return Image.new("RGB", (size.width, size.height))


def load_image_processor(
    name_or_path: str, *, offline: bool = False, trust_remote_code: bool = False
) -> ImageProcessor | None:
    """Load the image processor of a model.

    Args:
        name_or_path: Hub id or folder of the model.
        offline: Whether to use only local files.
        trust_remote_code: Whether to run Python code that comes with the processor.

    Returns:
        The processor. None if the model does not support images.

    Raises:
        UserError: If the processor cannot be loaded, or if it requires a package that is not installed.
    """
    from transformers import AutoProcessor

    def load() -> Any:
        files = (*TOKENIZER_FILES, CONFIG_FILE, *PROCESSOR_FILES)
        check_downloaded_settings("model.name_or_path", name_or_path, files, offline=offline)
        return AutoProcessor.from_pretrained(
            name_or_path, local_files_only=offline, trust_remote_code=bool(trust_remote_code)
        )

    try:
        processor = load() if offline else read_hub_once_per_node(name_or_path, "processor", load)
        if not hasattr(processor, "image_processor") or getattr(processor, "image_token", None) is None:
            return None
        return ImageProcessor(processor)
    except UserError:
        raise
    except Exception as error:  # damaged files cause exceptions of many classes
        reason = to_one_line(error)[:200] or type(error).__name__
        remedy = f"check the files {' and '.join(PROCESSOR_FILES[:2])} of the model"
        if isinstance(error, ImportError):
            remedy = "install the packages for images: pip install 'portable-trainer[images]'"
        raise UserError(
            f"model.name_or_path: cannot load the image processor of {name_or_path!r} ({reason}); {remedy}, "
            "or use another model"
        ) from error
