"""A tiny Qwen3-VL with random weights and a tokenizer of bytes, to try training on images without a download.

python examples/tiny_vlm.py tiny-vlm
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, the tokens of ChatML, and tokens of Qwen3-VL's images."""
    names = ["<pad>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *IMAGE_TOKENS]})
    fast.chat_template = TEMPLATE
    return fast


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """Build the config of a model with two layers of text and one layer of images."""
    ids = dict(zip(IMAGE_TOKENS, tokenizer.convert_tokens_to_ids(IMAGE_TOKENS), strict=True))
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    )


def main(folder: str) -> None:
    """Write the model, the tokenizer and the processor of images to a folder."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(build_config(tokenizer))
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=8, merge_size=2, min_pixels=256, max_pixels=16384),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=8, merge_size=2),
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
