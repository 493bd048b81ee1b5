"""Adapters on every engine, held against a loop in plain torch and peft."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from portable.data import TrainLoader
from portable.registry import create_backend
from portable.run.prepare import prepare
from portable.run.restore import restore
from portable.run.settle import settle
from tests.parity import opened

if TYPE_CHECKING:
    from portable.config import RunConfig

STEPS = 20
Losses = list[tuple[float, float]]
"""Loss and gradient norm of each step."""

COMMON: dict[str, Any] = {
    "adapter__type": "lora",
    "train__micro_batch_size": 1,
    "train__global_batch_size": 12,
    "train__steps": STEPS,
    "train__learning_rate": 1e-2,
}


def our_losses(config: RunConfig, steps: int = STEPS) -> Losses:
    with opened(config) as trial:
        results = [trial.step() for _ in range(steps)]
        losses = trial.backend.read([result.loss for result in results])
        norms = trial.backend.read([result.grad_norm for result in results])
        return list(zip(losses, norms, strict=True))


def peft_losses(config: RunConfig, steps: int = STEPS) -> Losses:
    """The same run as a person would write it with peft: one process, the whole batch at once."""
    import peft
    import transformers

    from portable.model.build import AUTO_CLASSES

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    backend = create_backend("cpu")
    run = prepare(settle(config.replaced({"adapter.base": "auto"}), backend.name), backend)
    engine = restore(run, None).engine  # only for its initial weights
    assert run.adapter is not None
    auto: Any = getattr(transformers, AUTO_CLASSES[config.model.task])
    base = auto.from_config(run.model_config, attn_implementation="sdpa")
    state = engine.model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, run.adapter.config)
    model.get_base_model().load_state_dict(state)
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    spared = ("bias", "norm")
    decay = [p for name, p in trained.items() if not any(word in name for word in spared)]
    rest = [p for name, p in trained.items() if any(word in name for word in spared)]
    groups = [
        {"params": decay, "weight_decay": config.train.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    beta1, beta2 = config.train.betas
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=(beta1, beta2), eps=config.train.eps
    )
    size = config.train.global_batch_size
    loader = iter(
        TrainLoader(run.data.train, seed=config.seed, global_batch_size=size, micro_batch_size=size)
    )
    results = []
    for step in range(steps):
        batch = next(loader)
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = run.schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(loss.detach()), float(norm)))
    loader.close()
    return results
