"""Tiny checkpoints of models that accept images, with the processor of each family, and tiny images."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.composite import build_composite_config

RED, BLUE = (220, 30, 30), (30, 30, 220)
_TEMPLATE = (
    "{{% for message in messages %}}<|im_start|>{{{{ message['role'] }}}}\n"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{image}"
    "{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
_IDEFICS_TOKENS = [
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def build_tokenizer(tokens: list[str], template_image: str, **named: str) -> Any:
    """Return a tokenizer of bytes, with the special tokens of a family of models.

    Args:
        tokens: Special tokens.
        template_image: Text that the chat template writes for an image.
        named: Special tokens with names, such as ``image_token``.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<|im_end|>", "<|im_start|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, *alphabet]
    tokenizer = tokenizers.Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        extra_special_tokens=named,
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *tokens]})
    fast.chat_template = _TEMPLATE.format(image=template_image)
    return fast


def _build_qwen(processor_class: str, image_processor: dict[str, Any]) -> Any:
    import transformers

    tokenizer = build_tokenizer(_QWEN_TOKENS, "<|vision_start|><|image_pad|><|vision_end|>")
    sizes = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024, **image_processor}
    return getattr(transformers, processor_class)(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(patch_size=4, merge_size=2),
    )


def _build_gemma() -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    turns = ["<start_of_turn>", "<end_of_turn>"]
    tokenizer = build_tokenizer([*named.values(), *turns], "<start_of_image>", **named)
    sizes = {"size": {"height": 16, "width": 16}, "image_seq_length": 4}
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(**sizes), tokenizer=tokenizer, image_seq_length=4
    )


def _build_idefics() -> Any:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    tokenizer = build_tokenizer(_IDEFICS_TOKENS, "<image>")
    return Idefics3Processor(
        image_processor=Idefics3ImageProcessor(**sizes), tokenizer=tokenizer, image_seq_len=4
    )


def _build_smolvlm() -> Any:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**sizes),
        tokenizer=build_tokenizer(_IDEFICS_TOKENS, "<image>"),
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=4,
    )


def _build_pixtral() -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    tokenizer = build_tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]")
    sizes = {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}}
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(**sizes),
        tokenizer=tokenizer,
        patch_size=4,
        spatial_merge_size=2,
    )


PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_5_vl": lambda: _build_qwen("Qwen2_5_VLProcessor", {}),
    "qwen3_vl": lambda: _build_qwen("Qwen3VLProcessor", {}),
    "qwen3_5": lambda: _build_qwen("Qwen3VLProcessor", {}),
    "gemma3": _build_gemma,
    "smolvlm": _build_smolvlm,
    "idefics3": _build_idefics,
    "mistral3": _build_pixtral,
}
"""Builder of the tiny processor of each family."""
_SIGLIP = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 1}
_QWEN_VISION = {"depth": 1, "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": 32}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**_QWEN_VISION, "fullatt_block_indexes": [0], "window_size": 16},
    "qwen3_vl": {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "qwen3_5": {**_QWEN_VISION, "num_position_embeddings": 16},
    "gemma3": _SIGLIP,
    "smolvlm": _SIGLIP,
    "idefics3": _SIGLIP,
    "mistral3": {"image_size": 32, "patch_size": 4, "num_hidden_layers": 1, "head_dim": 8},
}
"""Changes to the vision config of each family."""


def build_image_config(model_type: str, tokenizer: Any) -> Any:
    """Return the config of a tiny model with the image tokens of a tokenizer."""
    tokens = {
        "image_token_id": ("<|image_pad|>", "<image>"),
        "image_token_index": ("<image_soft_token>", "[IMG]"),
        "video_token_id": ("<|video_pad|>",),
        "vision_start_token_id": ("<|vision_start|>",),
        "vision_end_token_id": ("<|vision_end|>",),
        "boi_token_index": ("<start_of_image>",),
        "eoi_token_index": ("<end_of_image>",),
    }
    vocabulary = tokenizer.get_vocab()
    ids = {
        key: next(vocabulary[name] for name in names if name in vocabulary)
        for key, names in tokens.items()
        if any(name in vocabulary for name in names)
    }
    changes: dict[str, Any] = {}
    if model_type == "gemma3":
        changes["mm_tokens_per_image"] = 4
    if model_type in ("smolvlm", "idefics3"):
        changes["scale_factor"] = 2
    if model_type == "mistral3":
        changes["spatial_merge_size"] = 2
    config = build_composite_config(model_type, **changes)
    for key, value in ids.items():
        if hasattr(config, key):
            setattr(config, key, value)
    for key, value in _VISION[model_type].items():
        setattr(config.vision_config, key, value)
    config.get_text_config().max_position_embeddings = 512
    for part in (config, config.get_text_config()):
        part.eos_token_id, part.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        part.bos_token_id = tokenizer.bos_token_id
    return config


def write_image_model(folder: Path, model_type: str) -> Path:
    """Write a tiny checkpoint with its processor and tokenizer. Returns the folder."""
    import transformers

    processor = PROCESSORS[model_type]()
    config = build_image_config(model_type, processor.tokenizer)
    torch.manual_seed(1)
    model = getattr(transformers, config.architectures[0])(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_image(color: tuple[int, int, int], size: tuple[int, int] = (16, 16), kind: str = "PNG") -> bytes:
    """Return the file of an image of one color."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format=kind)
    return buffer.getvalue()


def write_squares(
    folder: Path, records: int = 16, *, sizes: tuple[tuple[int, int], ...] = ((16, 16),)
) -> Path:
    """Write red and blue squares, and conversations about their colors. Returns the file of records.

    Args:
        folder: Folder to write to.
        records: Number of records. Every fourth has no image, and every fifth has two.
        sizes: Sizes of the images, in turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(records):
        names = ("red", "blue") if index % 2 else ("blue", "red")
        count = 0 if index % 4 == 3 else 2 if index % 5 == 4 else 1
        parts: list[dict[str, Any]] = []
        for name in names[:count]:
            file = folder / f"{index}-{name}.png"
            file.write_bytes(make_image(RED if name == "red" else BLUE, sizes[index % len(sizes)]))
            parts.append({"type": "image", "path": file.name})
        question = {"type": "text", "text": "Which color?" if count else "Say hello."}
        answer = " and ".join(names[:count]) or "hello"
        lines.append(
            {
                "messages": [
                    {"role": "user", "content": [*parts, question]},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    path = folder / "squares.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
