"""Compare texts in padded and packed batches with each text by itself: ``python -m tests.alone``.

Some models derive a quantity from the padded or packed length of a batch, such as the factors of LongRoPE.
For each pair of a model type and a task, a tiny model computes the same texts one by one, as transformers
does without padding, and together in one batch of this package. The thresholds of a model that depend on a
length are smaller than the texts. Each type with rotary embeddings is also compared with LongRoPE and with
dynamic NTK scaling.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from portable.data.samples.base import pad_rows
from portable.errors import UserError
from portable.model.document_attention import (
    check_causal_attention,
    check_document_separation,
    install_document_forward,
)
from portable.model.document_states import install_document_states
from portable.model.dynamic_rope import check_length_dependent_rope, install_text_length_forward
from portable.model.labels import classifies_at_last_position
from portable.private.transformers_internals import skip_mask_value_checks
from tests.architectures import COMPOSITE, Pair, auto_class, pairs
from tests.tiny_models import tiny_config

SEQ_LEN, LIMIT, PAD = 32, 16, 3
LENGTHS = (5, 30, 9, 16, 17, 23)
"""Tokens of each text. Some are longer than :data:`LIMIT`."""
ROWS = ((0, 3, 2), (1,), (4,), (5, 2))
"""The texts in each sample of packed documents."""
TOLERANCE = 1e-4
THRESHOLDS = {
    "sliding_window": 4,
    "local_attention": 4,
    "index_topk": 4,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "keep_window_size": 8,
    "block_size": 2,
    "num_random_blocks": 1,
    "num_landmarks": 4,
    "segment_means_seq_len": SEQ_LEN,
    "local_radius": 4,
    "global_block_size": 4,
    "relative_attention_max_distance": 8,
    "relative_attention_num_buckets": 8,
    "original_max_position_embeddings": LIMIT,
    "expert_capacity": 8,
}
"""Settings of lengths in the configs of transformers, and values that are smaller than the texts."""
NOT_COMPARED = {
    ("diffusion_gemma", COMPOSITE): "its logits are not the logits of the text",
    ("xlnet", "causal-lm"): "transformers cannot compute attn_type uni with padding",
}
"""Pairs that transformers cannot compute on padded text, with the reason."""
VARIANTS = ("thresholds", "longrope", "dynamic")


class Comparison(NamedTuple):
    """Result of the comparison of one batch.

    Attributes:
        gap: The largest difference, relative to the largest output. Infinite if an output is not finite.
        refused: The reason if this package refuses the batch.
    """

    gap: float = 0.0
    refused: str = ""


def change_rope(config: Any, rope_type: str) -> bool:
    """Give the text part of a config another rope type.

    Args:
        config: The config to change.
        rope_type: ``longrope`` or ``dynamic``.

    Returns:
        Whether the config has rotary embeddings.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return False
    by_layer = {name: value for name, value in rope.items() if isinstance(value, dict)}
    for scope in by_layer.values() or [rope]:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if getattr(text, "qk_rope_head_dim", None):
            head_dim = text.qk_rope_head_dim
        count = int(head_dim * scope.get("partial_rotary_factor", 1.0)) // 2
        scope["rope_type"], scope["factor"] = rope_type, 4.0
        if rope_type == "longrope":
            scope["original_max_position_embeddings"] = LIMIT
            scope["short_factor"] = [1.0] * count
            scope["long_factor"] = [1.0 + 2 * number for number in range(count)]
            scope["short_mscale"], scope["long_mscale"] = 1.0, 1.3
    text.max_position_embeddings = 64 if rope_type == "longrope" else LIMIT
    return True


def build(pair: Pair, variant: str) -> Any:
    """Build the tiny model of a pair, or return None if a variant does not apply to its type."""
    import transformers
    from transformers import AutoConfig

    from tests.composite import build_composite_config

    if pair.task == COMPOSITE:
        config = build_composite_config(pair.model_type)
        make = getattr(transformers, config.architectures[0])._from_config
    else:
        config = AutoConfig.for_model(**tiny_config(*pair))
        make = auto_class(pair.task).from_config
    for part in (config, config.get_text_config()):
        for name, value in THRESHOLDS.items():
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, value)
        if (
            isinstance(scope := getattr(part, "rope_parameters", None), dict)
            and "llama_4_scaling_beta" in scope
        ):
            scope["original_max_position_embeddings"] = 4
        if pair.task == "causal-lm" and hasattr(part, "is_decoder"):
            part.is_decoder = True
    decoder: Any = getattr(config, "decoder", None)
    if hasattr(decoder, "add_cross_attention"):
        decoder.is_decoder = decoder.add_cross_attention = True
    if variant != "thresholds" and not change_rope(config, variant):
        return None
    torch.manual_seed(0)
    try:
        model = make(config, attn_implementation="sdpa", dtype=torch.float32)
    except ValueError:
        model = make(config, attn_implementation="eager", dtype=torch.float32)
    model.config.use_cache = False
    for part in (model.config, model.config.get_text_config()):
        part.pad_token_id = PAD  # classifiers look for it
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) / 10)
    return model.eval()


def draw_texts() -> list[torch.Tensor]:
    """Draw random tokens for texts of :data:`LENGTHS`."""
    random = torch.Generator().manual_seed(0)
    return [torch.randint(5, 300, (length,), generator=random) for length in LENGTHS]


def compute_alone(model: Any, pair: Pair, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the logits of each text by itself with transformers."""
    results = []
    for text in texts:
        inputs = {"input_ids": text[None]}
        if pair.task == "seq2seq-lm":
            inputs["decoder_input_ids"] = text.flip(0)[None]
        with torch.no_grad():
            logits = copy.deepcopy(model)(**inputs).logits[0]
        # Perceiver returns a fixed number of positions.
        results.append(logits[: len(text)] if logits.dim() > 1 else logits)
    return results


def _compute_batch(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    install_text_length_forward(install_document_states(install_document_forward(model)))
    with torch.no_grad(), skip_mask_value_checks():
        logits: torch.Tensor = model(**batch).logits
    return logits


def compute_padded(model: Any, pair: Pair, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the logits of all texts in one batch with padding, as the samples of a task have it."""
    check_length_dependent_rope(model.config, pair.task, "model")
    if pair.task in ("causal-lm", COMPOSITE):
        check_causal_attention(model)
    rows = [text.numpy() for text in texts]
    ids, mask = (torch.from_numpy(values) for values in pad_rows(rows, SEQ_LEN, PAD))
    if pair.task == "sequence-classification" and classifies_at_last_position(model.config):
        for row, text in enumerate(texts):
            ids[row], mask[row] = (values[row].roll(SEQ_LEN - len(text)) for values in (ids, mask))
    batch = {"input_ids": ids, "attention_mask": mask}
    if pair.task == "seq2seq-lm":
        targets, _ = pad_rows([text.flip(0).numpy() for text in texts], SEQ_LEN, PAD)
        batch["decoder_input_ids"] = torch.from_numpy(targets)
    logits = _compute_batch(model, batch)
    if logits.dim() < 3:
        return list(logits)
    return [row[: len(text)] for row, text in zip(logits, texts, strict=True)]


def compute_packed(model: Any, pair: Pair, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the logits of all texts in samples of packed documents."""
    check_document_separation(model, seq_len=SEQ_LEN)
    shape = (len(ROWS), SEQ_LEN)
    ids, positions = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.int64)
    lengths = torch.zeros(len(ROWS), 4, dtype=torch.int64)
    places: dict[int, tuple[int, int]] = {}
    for row, numbers in enumerate(ROWS):
        start = 0
        for column, number in enumerate(numbers):
            size = len(texts[number])
            ids[row, start : start + size] = texts[number]
            positions[row, start : start + size] = torch.arange(size)
            lengths[row, column] = size
            places[number] = (row, start)
            start += size
        lengths[row, len(numbers)] = SEQ_LEN - start
    logits = _compute_batch(model, {"input_ids": ids, "position_ids": positions, "document_lengths": lengths})
    starts = [places[number] for number in range(len(texts))]
    return [logits[row, start : start + len(text)] for (row, start), text in zip(starts, texts, strict=True)]


def compare(pair: Pair) -> Iterator[tuple[str, Comparison]]:
    """Compare the texts of a pair in each kind of batch with each text by itself.

    Yields:
        The names of the variant and the kind of batch, and the result. For types that transformers cannot
        build or run on text, the reason.
    """
    texts = draw_texts()
    kinds: dict[str, Callable[..., list[torch.Tensor]]] = {"padded": compute_padded}
    if pair.task in ("causal-lm", COMPOSITE):
        kinds["packed"] = compute_packed
    if (reason := NOT_COMPARED.get((pair.model_type, pair.task))) is not None:
        yield "alone", Comparison(refused=f"not run: {reason}")
        return
    for variant in VARIANTS:
        try:
            model = build(pair, variant)
            if model is None:
                continue
            alone = compute_alone(model, pair, texts)
        except Exception as error:
            yield f"{variant} alone", Comparison(refused=f"not run: {type(error).__name__}: {error}"[:120])
            continue
        for kind, compute in kinds.items():
            try:
                together = compute(copy.deepcopy(model), pair, texts)
            except UserError as error:
                yield f"{variant} {kind}", Comparison(refused=str(error))
                continue
            largest = max(float(logits.abs().max()) for logits in alone)
            gaps = [
                float((ours - theirs).abs().max()) / max(largest, 1e-9)
                for ours, theirs in zip(together, alone, strict=True)
            ]
            gap = float(torch.tensor(gaps).max())
            yield f"{variant} {kind}", Comparison(gap if gap == gap else float("inf"))


def main(arguments: list[str]) -> int:
    """Compare all pairs, print a line for each, and return 1 if any batch differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.alone", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--json", type=Path, help="file for the results")
    chosen = parser.parse_args(arguments)
    results: dict[str, dict[str, tuple[float, str]]] = {}
    for pair in pairs():
        if chosen.types and pair.model_type not in chosen.types:
            continue
        start, name = time.monotonic(), f"{pair.model_type} {pair.task}"
        results[name] = {}
        try:
            results[name] |= {kind: (result.gap, result.refused) for kind, result in compare(pair)}
        except Exception as error:
            results[name]["error"] = (float("inf"), f"{type(error).__name__}: {error}"[:300])
        shown = "; ".join(
            f"{kind}: {reason or f'{gap:.1e}'}"
            for kind, (gap, reason) in results[name].items()
            if reason or not gap < TOLERANCE
        )
        print(f"{name} ({time.monotonic() - start:.1f} s): {shown or 'ok'}", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(results, indent=1))
    return int(any(not gap < TOLERANCE for kinds in results.values() for gap, _ in kinds.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
