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


_SQUARE = {"height": 16, "width": 16}
_PARTS = [[16, 32], [32, 16], [32, 32]]
"""Sizes to which processors of several models scale an image that they divide into squares."""


def _build_llava() -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=_SQUARE),
        build_tokenizer(["<image>"], "<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _build_llava_next() -> Any:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    sizes = {"size": {"shortest_edge": 16}, "crop_size": _SQUARE, "image_grid_pinpoints": _PARTS}
    return LlavaNextProcessor(
        LlavaNextImageProcessor(**sizes),
        build_tokenizer(["<image>"], "<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _build_llava_onevision() -> Any:
    import transformers

    return transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=_PARTS),
        build_tokenizer(["<image>", "<video>"], "<image>"),
        transformers.LlavaOnevisionVideoProcessor(size=_SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )


def _build_internvl() -> Any:
    import transformers

    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, max_patches=4),
        build_tokenizer([*named.values()], "<IMG_CONTEXT>", **named),
        transformers.InternVLVideoProcessor(size=_SQUARE),
        image_seq_length=4,
    )


def _build_glm() -> Any:
    import transformers

    names = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
    template_image = "<|begin_of_image|><|image|><|end_of_image|>"
    sizes = {"patch_size": 4, "merge_size": 2}
    return transformers.Glm4vProcessor(
        transformers.Glm4vImageProcessor(size={"shortest_edge": 64, "longest_edge": 2048}, **sizes),
        build_tokenizer([*names, "<|image|>", "<|video|>"], template_image),
        transformers.Glm4vVideoProcessor(**sizes),
    )


def _build_aya() -> Any:
    from transformers import AyaVisionProcessor, GotOcr2ImageProcessor

    names = ["START_OF_IMG", "END_OF_IMG", "IMG_PATCH", "IMG_LINE_BREAK"]
    tokens = ["<image>", *(f"<|{name}|>" for name in names), "TILE", "TILE_GLOBAL"]
    return AyaVisionProcessor(
        GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, max_patches=4),
        build_tokenizer(tokens, "<image>"),
        patch_size=4,
        img_size=16,
        downsample_factor=2,
    )


def _build_gemma4() -> Any:
    import transformers

    named = {f"{kind}_token": f"<|{kind}|>" for kind in ("image", "boi", "eoi", "audio", "boa", "eoa")}
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2),
        build_tokenizer([*named.values()], "<|image|>", **named),
        transformers.Gemma4VideoProcessor(),
    )


def _build_paligemma() -> Any:
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    image_processor = SiglipImageProcessor(size=_SQUARE)
    image_processor.image_seq_length = 16
    tokenizer = build_tokenizer(["<image>"], "<image>", image_token="<image>")
    return PaliGemmaProcessor(image_processor, tokenizer)


def _build_idefics2() -> Any:
    from transformers import Idefics2ImageProcessor, Idefics2Processor

    sizes = {"size": {"shortest_edge": 16, "longest_edge": 32}, "do_image_splitting": False}
    tokens = ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]
    return Idefics2Processor(
        Idefics2ImageProcessor(**sizes), build_tokenizer(tokens, "<image>"), image_seq_len=4
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
"""Builder of the tiny processor of each family that the documentation names."""
OTHER_PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _build_qwen("Qwen2VLProcessor", {}),
    "llava": _build_llava,
    "llava_next": _build_llava_next,
    "internvl": _build_internvl,
    "glm4v": _build_glm,
    "aya_vision": _build_aya,
    "gemma4": _build_gemma4,
    "paligemma": _build_paligemma,
    "llava_onevision": _build_llava_onevision,
    "idefics2": _build_idefics2,
}
"""Builder of the tiny processor of other families."""
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
    "qwen2_vl": {"depth": 1, "patch_size": 4, "spatial_merge_size": 2, "hidden_size": 32},
    "llava": {"image_size": 16, "patch_size": 4},
    "llava_next": {"image_size": 16, "patch_size": 4},
    "internvl": {"image_size": [16, 16], "patch_size": [4, 4]},
    "glm4v": _QWEN_VISION,
    "aya_vision": _SIGLIP,
    "paligemma": {**_SIGLIP, "projection_dim": 32},
    "llava_onevision": _SIGLIP,
    "idefics2": _SIGLIP,
}
"""Changes to the vision config of each family."""
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "smolvlm": {"scale_factor": 2},
    "idefics3": {"scale_factor": 2},
    "mistral3": {"spatial_merge_size": 2},
    "llava": {"vision_feature_select_strategy": "default"},
    "llava_next": {"vision_feature_select_strategy": "default", "image_grid_pinpoints": _PARTS},
    "llava_onevision": {"vision_feature_select_strategy": "full", "image_grid_pinpoints": _PARTS},
    "internvl": {"image_seq_length": 4, "downsample_ratio": 0.5},
    "aya_vision": {"downsample_factor": 2},
    "gemma4": {
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "patch_size": 4,
            "pooling_kernel_size": 2,
        }
    },
}
"""Changes to the config of each family."""


def build_image_config(model_type: str, processor: Any) -> Any:
    """Return the config of a tiny model with the image tokens of a processor."""
    tokenizer = processor.tokenizer
    tokens = {
        "video_token_id": ("<|video_pad|>", "<|video|>", "<video>"),
        "vision_start_token_id": ("<|vision_start|>",),
        "vision_end_token_id": ("<|vision_end|>",),
        "image_start_token_id": ("<|begin_of_image|>",),
        "image_end_token_id": ("<|end_of_image|>",),
        "boi_token_index": ("<start_of_image>",),
        "eoi_token_index": ("<end_of_image>",),
        "boi_token_id": ("<|boi|>",),
        "eoi_token_id": ("<|eoi|>",),
        "audio_token_id": ("<|audio|>",),
    }
    vocabulary = tokenizer.get_vocab()
    ids = {
        key: next(vocabulary[name] for name in names if name in vocabulary)
        for key, names in tokens.items()
        if any(name in vocabulary for name in names)
    }
    image_token_id = vocabulary.get("<image_soft_token>", processor.image_token_id)  # of Gemma 3
    ids |= dict.fromkeys(("image_token_id", "image_token_index"), image_token_id)
    config = build_composite_config(model_type, **_CHANGES.get(model_type, {}))
    for key, value in ids.items():
        if hasattr(config, key):
            setattr(config, key, value)
    for key, value in _VISION.get(model_type, {}).items():
        setattr(config.vision_config, key, value)
    text = config.get_text_config()
    text.max_position_embeddings, text.vocab_size = 512, max(text.vocab_size, len(tokenizer))
    for part in (config, text):
        part.eos_token_id, part.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        part.bos_token_id = tokenizer.bos_token_id
    return config


def write_image_model(folder: Path, model_type: str) -> Path:
    """Write a tiny checkpoint with its processor and tokenizer. Returns the folder."""
    import transformers

    processor = {**PROCESSORS, **OTHER_PROCESSORS}[model_type]()
    config = build_image_config(model_type, processor)
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
