"""Scores of lm-evaluation-harness while a run trains: a callback.

pip install lm_eval
portable-train --config run.yaml --train.callbacks "eval_harness:EvalHarness(tasks=['words'])"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable import Run


class EvalHarness:
    """Runs tasks at each evaluation, on every rank alike, and logs their numbers with the next step.

    Args:
        tasks: their names.
        include_path: folder of tasks of your own.
        limit: documents of a task to use; None for all.
        batch_size: requests of a forward pass.
    """

    def __init__(
        self,
        tasks: list[str],
        include_path: str | None = None,
        limit: int | None = None,
        batch_size: int = 8,
    ) -> None:
        self.tasks = tasks
        self.include_path = include_path
        self.limit = limit
        self.batch_size = batch_size

    def on_evaluation(self, run: Run, values: Mapping[str, Any]) -> None:
        for name, value in self.scores(run.model, run.tokenizer).items():
            if run.rank == 0:
                run.log({f"harness/{name}": value})

    def scores(self, model: Any, tokenizer: Any) -> dict[str, float]:
        """The numbers of every task, as ``task/metric``."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                found = simple_evaluate(
                    model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.batch_size),
                    tasks=self.tasks,
                    task_manager=TaskManager(include_path=self.include_path),
                    limit=self.limit,
                    bootstrap_iters=0,
                    verbosity="ERROR",
                )
        finally:
            model.train(training)
        return {
            f"{task}/{metric.partition(',')[0]}": float(value)
            for task, numbers in (found or {"results": {}})["results"].items()
            for metric, value in numbers.items()
            if isinstance(value, int | float) and "stderr" not in metric and "," in metric
        }
