"""Generate the config keys of transformers 4 as data: ``python -m tests.earlier_keys``.

transformers 5 still reads the keys of transformers 4.57 and stores their values elsewhere. The command gives
each key of 4.57 that 5 does not save an unusual value, and finds this value in the config that 5 saves.
``tests/test_owners.py`` checks with transformers 4.57 that the values arrive. The environment variable
``PORTABLE_OWNERS`` names the folder with transformers 4.57, see `tests/owners.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.owners import run_judge

FILE = Path(__file__).resolve().parents[1] / "converters" / "names" / "earlier_config_keys.json"
SCALING = {"rope_type": "linear", "factor": 3.5}


class Probe(NamedTuple):
    """An earlier key with an unusual value.

    Attributes:
        model_type: Model type of the config.
        key: Key of transformers 4.
        value: The unusual value.
        path: Path under which transformers 5 saves the value.
        saved: The config that transformers 5 saves.
    """

    model_type: str
    key: str
    value: Any
    path: str
    saved: dict[str, Any]


def build_table() -> dict[str, Any]:
    """Build the content of the file."""
    defaults = run_judge("transformers4", {"defaults": Path()}, "list_defaults")["defaults"]
    probes = list(make_probes(defaults))
    types: dict[str, dict[str, str]] = {}
    for probe, config in zip(
        probes, read_with_transformers_4([probe.saved for probe in probes]), strict=True
    ):
        # transformers 4 may also find the value under the path of transformers 5.
        if isinstance(config, dict) and not contains(config.get(probe.key), probe.value):
            types.setdefault(probe.model_type, {})[probe.key] = probe.path
    scaled = [model_type for model_type, paths in types.items() if "rope_scaling" in paths]
    read = read_with_transformers_4([{"model_type": name, "rope_scaling": SCALING} for name in scaled])
    named_type = [name for name, config in zip(scaled, read, strict=True) if isinstance(config, str)]
    return {"transformers": defaults["version"], "scaling_with_type": named_type, "types": types}


def build_probed_config(model_type: str, paths: dict[str, str]) -> dict[str, Any]:
    """Return a config as transformers 5 saves it, with an unusual value under each path.

    Args:
        model_type: Model type of the config.
        paths: Paths of the values, keyed by the earlier key.
    """
    from transformers import CONFIG_MAPPING

    config: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    for path in sorted(set(paths.values())):
        *parents, leaf = path.split(".")
        part = config
        for parent in parents:
            part = part.setdefault(parent, {})
        if path in ("rope_parameters", "rope_parameters.full_attention"):
            theta = {key: part[leaf][key] for key in ("rope_theta",) if key in part[leaf]}
            part[leaf] = {**theta, **SCALING}
        else:
            part[leaf] = 0.375 if "factor" in leaf else 4321 + len(leaf)
    return {"model_type": model_type, **config}


def read_with_transformers_4(configs: list[dict[str, Any]]) -> list[Any]:
    """Return the keys that transformers 4.57 reads from each config, or its error message."""
    with TemporaryDirectory() as scratch:
        for i, config in enumerate(configs):
            Path(scratch, f"{i}.json").write_text(json.dumps(config, default=str))
        read = run_judge("transformers4", {"probes": Path(scratch)}, "read_configs")["probes"]["configs"]
    return [read[str(i)] for i in range(len(configs))]


def contains(value: Any, probe: Any) -> bool:
    """Return whether a value is the probe, or contains the scaling of the probe."""
    return value == probe or (
        isinstance(value, dict) and isinstance(probe, dict) and probe.items() <= value.items()
    )


def make_probes(defaults: dict[str, Any]) -> Iterator[Probe]:
    """Yield a probe for each key of transformers 4 that transformers 5 saves elsewhere.

    Args:
        defaults: ``common`` keys of all configs of transformers 4, and ``types``: the keys and values of each
            type's default config.
    """
    from transformers import CONFIG_MAPPING

    for model_type, values in defaults["types"].items():
        try:
            saved = CONFIG_MAPPING[model_type]().to_dict()
        except Exception:  # The type does not exist any more, or its default config is not valid.
            continue
        for key in sorted(values.keys() - saved.keys() - set(defaults["common"])):
            if not key.startswith("_") and (value := choose_value(key, values[key])) is not None:
                yield from trace(model_type, key, value, saved)


def trace(model_type: str, key: str, value: Any, saved: dict[str, Any]) -> Iterator[Probe]:
    """Yield a probe if transformers 5 saves the value of an earlier key under exactly one other path.

    Args:
        model_type: Model type of the config.
        key: Key of transformers 4.
        value: An unusual value.
        saved: Default config of transformers 5.
    """
    from transformers import CONFIG_MAPPING

    before = dict(iterate_leaves(saved))
    try:
        config = CONFIG_MAPPING[model_type](**{key: value})
        paths = find_leaves(config.to_dict(), value, before)
        if not paths and f"rope_parameters.{key}" in before:  # The default of rope_parameters wins.
            config = CONFIG_MAPPING[model_type](rope_parameters={**saved["rope_parameters"], key: value})
            paths = find_leaves(config.to_dict(), value, before)
    except Exception:  # transformers 5 rejects the value.
        return
    if len(paths) == 1 and paths[0] != key and not paths[0].split(".")[0].endswith("_config"):
        path = paths[0].removesuffix(".factor") if value is SCALING else paths[0]
        yield Probe(model_type, key, value, path, {"model_type": model_type, **config.to_dict()})


def find_leaves(config: dict[str, Any], value: Any, before: dict[str, Any]) -> list[str]:
    """Return the paths of a value in a config that had another value before."""
    wanted = SCALING["factor"] if value is SCALING else value
    return [path for path, item in iterate_leaves(config) if item == wanted != before.get(path)]


def choose_value(key: str, value: Any) -> Any:
    """Return a value that no default has, or None if the key cannot be traced."""
    if key == "rope_scaling":
        return SCALING
    if type(value) is int:
        return value + 3
    if type(value) is float:
        return value * 0.5 + 0.0625 if value <= 1 else value + 4321.0
    return None


def iterate_leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each number and string of nested dicts."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from iterate_leaves(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value


def main() -> None:
    """Write the file."""
    FILE.write_text(json.dumps(build_table(), indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
