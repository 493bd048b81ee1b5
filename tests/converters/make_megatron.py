"""Write Megatron-LM checkpoints with the parallel models of Megatron-Core, on CPU under gloo.

Its calls of CUDA are replaced. The files have the layout of megatron/training/checkpointing.py, whose import
needs a GPU. `<name>.logits.pt` has the logits of the parallel model for `TOKENS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.converters.make_dcp import launch

VOCAB, PADDED, LAYERS = 120, 128, 4
GELU = partial(torch.nn.functional.gelu, approximate="tanh")
TOKENS = torch.arange(3, 23)[None]


def settings(kind: str, tp: int, pp: int) -> argparse.Namespace:
    """Return the arguments of Megatron's parser for the model."""
    llama = kind != "gpt"
    return argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        group_query_attention=llama,
        num_query_groups=2 if llama else 4,
        kv_channels=12 if kind == "llama-tied" else 8,
        ffn_hidden_size=48,
        swiglu=llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        position_embedding_type="rope" if llama else "learned_absolute",
        add_bias_linear=not llama,
        add_qkv_bias=kind == "llama-tied",
        untie_embeddings_and_output_weights=kind == "llama",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        world_size=tp * pp,
        rank=dist.get_rank(),
        padded_vocab_size=PADDED,
        params_dtype=torch.float32,
        num_experts=None,
        rotary_percent=1.0,
    )


def stage(args: argparse.Namespace, pp: int) -> Any:
    """Build this rank's part of the model, with weights that do not depend on the parallelism."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    shared = {field.name for field in dataclasses.fields(TransformerConfig)} & vars(args).keys()
    config = TransformerConfig(
        **{name: getattr(args, name) for name in shared},
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else GELU,
        layernorm_epsilon=1e-5,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=PADDED,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    )
    tp = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, value in model.named_parameters():
            cut = getattr(value, "tensor_model_parallel", False)
            words = name.startswith(("embedding.word", "output_layer"))
            tied = words and not args.untie_embeddings_and_output_weights
            seed = f"words {tp}" if tied else f"{pp} {name} {tp if cut else ''}"
            generator = torch.Generator().manual_seed(sum(seed.encode()) * 7919)
            made = torch.randn(value.shape, generator=generator)
            value.copy_(made * 0.2 + (1 if "layernorm" in name and name.endswith("weight") else 0))
    return model.eval()


def logits(model: Any, rank: int, tp: int, pp: int) -> torch.Tensor | None:
    """Compute the logits of the full model. The hidden states are sent from stage to stage."""
    number = rank // tp
    length = TOKENS.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    if number:
        hidden = torch.empty(length, 1, 32)
        dist.recv(hidden, rank - tp)
        model.set_input_tensor(hidden)
    with torch.no_grad():
        out = model(TOKENS, torch.arange(length)[None], mask)
    if number < pp - 1:
        dist.send(out.contiguous(), rank + tp)
        return None
    return out[0, :, :VOCAB]  # type: ignore[no-any-return]


def save(rank: int, world: int, out: Path, *, kind: str, tp: int, pp: int) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[return-value,assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda *_: None
    random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    parallel_state.initialize_model_parallel(tp, pp)
    args = settings(kind, tp, pp)
    model = stage(args, rank // tp)
    found = logits(model, rank, tp, pp)
    if found is not None and rank == world - 1:
        torch.save(found, out / f"{kind}-{tp}x{pp}.logits.pt")
    folder = out / f"{kind}-{tp}x{pp}" / "iter_0000007"
    place = f"mp_rank_{rank % tp:02d}" + (f"_{rank // tp:03d}" if pp > 1 else "")
    (folder / place).mkdir(parents=True)
    held = model.state_dict_for_save_checkpoint()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": held}
    torch.save(state, folder / place / "model_optim_rng.pt")
    if rank == 0:
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    core = out / f"core-{kind}-{tp}x{pp}" / "iter_0000007"
    if rank == 0:
        core.mkdir(parents=True)
    dist.barrier()
    # Its default queue starts a process that would import the caller of this module again.
    fork = multiprocessing.get_context("fork")
    filesystem_async._get_write_results_queue = lambda: fork.Manager().Queue()
    sharded = {"args": args, "iteration": 7, "model": model.sharded_state_dict()}
    dist_checkpointing.save(sharded, str(core), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
    parallel_state.destroy_model_parallel()


def main(out: Path) -> None:
    """Write everything under `out`."""
    # Once, and not on each rank.
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.models.gpt  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind, tp, pp in (("llama", 2, 2), ("llama-tied", 2, 1), ("gpt", 2, 2)):
        launch(tp * pp, out, partial(save, kind=kind, tp=tp, pp=pp))
