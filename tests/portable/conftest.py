from __future__ import annotations

from typing import Any

import pytest

_passes: dict[Any, Any] = {}
"""Results of measured passes, keyed by all arguments that affect them."""


@pytest.fixture
def passes_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache measured passes, so that the planner runs the passes of each model once per session."""
    from portable.planner import activations as passes

    run = passes.measure_activations

    def known(model: Any, request: Any) -> Any:
        config = model.config
        key = (type(model), config.to_json_string(use_diff=False), config._attn_implementation, request)
        if key not in _passes:
            _passes[key] = run(model, request)
        return _passes[key]

    monkeypatch.setattr(passes, "measure_activations", known)


@pytest.fixture
def brief_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the report of runs in this process."""
    monkeypatch.setattr("portable.reporting.reporter.write_report", lambda *_, **options: [])
