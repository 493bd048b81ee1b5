"""Whether two configs describe the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config import keys
from portable.config.origins import shown
from portable.config.run_config import RunConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

_MISSING = object()


def difference(a: RunConfig | Mapping[str, Any], b: RunConfig | Mapping[str, Any]) -> list[str]:
    """The settings that differ between two runs, one line each: ``train.steps: 200 and 300``.

    Takes configs or their fingerprints, also from JSON. A key missing in a fingerprint of an older release
    counts as its default. The result is empty for the same run.
    """
    left, right = _flat(a), _flat(b)
    lines = []
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key, _MISSING), right.get(key, _MISSING)
        if one != other:
            lines.append(f"{key}: {_shown(one)} and {_shown(other)}")
    return lines


def _flat(run: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint with dotted keys for its mappings, so that they are compared one by one."""
    values = run.fingerprint() if isinstance(run, RunConfig) else dict(run)
    for key, setting in keys.settings(RunConfig).items():
        if setting.identity:
            values.setdefault(key, keys.plain(setting.default))
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{name}": item for name, item in value.items()})
        elif value is not None:
            flat[key] = value
    return flat


def _shown(value: object) -> str:
    return "not set" if value is _MISSING else shown(value)
