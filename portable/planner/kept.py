"""What was found out about a model, kept for the next plan: which then needs neither torch nor transformers.

Kept in the cache folder, under a fingerprint of all that it depends on: how the model is described, which
parts of it are gathered, the releases of the libraries that build and run it, and our own source. A file that
cannot be read, or is not as it was written, counts as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.paths import default_cache_dir
from portable.planner.inventory import Inventory, Weight
from portable.planner.passes import Activations, Peak, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portable.config import ModelConfig, RunConfig
    from portable.planner.subject import Subject

MOST_MODELS = 100
_BUILT_WITH = ("torch", "transformers", "accelerate")
_UNFINISHED = re.compile(r"dev|git|\da\d")  # as development versions and builds of a branch are called
_EDITABLE = re.compile(r'"editable":\s*true')
_ROOMS = ("portable", "gpu", "tpu")


class KeptSubject:
    """A model of which something is known, and which is built when that is not enough.

    Args:
        config: of the run; see :func:`fingerprint` for what of it matters.
        build: the model itself.
    """

    def __init__(self, config: RunConfig, build: Callable[[], Subject]) -> None:
        self._config = config
        self._build = build
        self._live: Subject | None = None
        self._file = _file_of(config)
        self._peaks: dict[Request, Activations] = {}
        self._learned = False
        known = _read(self._file)
        if known is None:
            self.inventory = self._model().inventory
        else:
            self.inventory, self._peaks = known

    def activations(self, request: Request) -> Activations:
        """See :class:`portable.planner.subject.Subject`."""
        if request not in self._peaks:
            self._peaks[request] = self._model().activations(request)
            self._learned = True
        return self._peaks[request]

    def keep(self) -> None:
        """Remember what was learned, if there is anything and it can be."""
        if not self._learned:
            return
        file = _file_of(self._config)
        # A model of the hub is in its cache by now; one that has changed meanwhile is not what was built.
        if file is None or self._file not in (None, file):
            return
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
            text = json.dumps(_as_json(self.inventory, self._peaks))
            partial.write_text(f"{_digest(text)}\n{text}", "utf-8")
            partial.replace(file)
            by_use = sorted(file.parent.iterdir(), key=lambda other: -other.stat().st_mtime_ns)
            for old in by_use[MOST_MODELS:]:
                old.unlink()

    def _model(self) -> Subject:
        if self._live is None:
            self._live = self._build()
        return self._live


def fingerprint(config: RunConfig) -> str | None:
    """Of all that the inventory and the peaks of a model depend on; None where that is not known.

    Beside what a :class:`Request` says, these are the sections ``model`` (with which of it was given: what is
    asked for in words is refused where a default makes way) and ``fsdp``, and the backend.
    """
    described = _description(config.model)
    releases = [_release(package) for package in _BUILT_WITH]
    # Code from a hub, or from a development version, changes under the same name.
    if described is None or config.model.trust_remote_code or None in releases:
        return None
    try:
        sources = list(_sources())
    except (OSError, ValueError):
        return None
    digest = hashlib.sha256()
    given = ",".join(sorted(config.model.model_fields_set))
    sections = config.model.model_dump_json(), given, config.fsdp.model_dump_json()
    for text in (*sections, config.backend, sys.version, *filter(None, releases), *sources):
        digest.update(text.encode())
        digest.update(b"\0")
    digest.update(described)
    return digest.hexdigest()


def _file_of(config: RunConfig) -> Path | None:
    found = fingerprint(config)
    try:
        return None if found is None else default_cache_dir() / "plans" / f"{found}.json"
    except RuntimeError:  # nobody's home
        return None


def _description(settings: ModelConfig) -> bytes | None:
    """The config.json of a model that is named; None where it is not at hand."""
    if settings.name_or_path is None:
        return b""
    folder = Path(settings.name_or_path)
    try:
        found = (folder / "config.json").read_bytes() if folder.is_dir() else _from_hub(settings.name_or_path)
    except OSError:
        return None
    # By that key transformers reads another file in its place.
    return None if found is None or b'"configuration_files"' in found else found


def _from_hub(name: str) -> bytes | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        # What is not in the cache is left to transformers, which downloads it or says what is wrong.
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        return Path(hf_hub_download(name, "config.json")).read_bytes()
    except Exception:  # whatever the hub or its client raises: the model is built as if nothing were known
        return None


def _release(package: str) -> str | None:
    """Name and version; None for what may change without changing these."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return None
    editable = _EDITABLE.search(found.read_text("direct_url.json") or "")
    return None if editable or _UNFINISHED.search(found.version) else f"{package} {found.version}"


def _sources() -> Iterator[str]:
    for room in _ROOMS:
        spec = find_spec(room)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted(Path(folder).rglob("*.py")):
                if file.is_file():
                    yield file.read_text("utf-8")


def _as_json(inventory: Inventory, peaks: dict[Request, Activations]) -> dict[str, Any]:
    # A guess is not kept: its reason may be gone.
    known = [(request, found) for request, found in peaks.items() if found.failure is None]
    return {
        "inventory": asdict(inventory),
        "peaks": [{"request": asdict(request), "found": asdict(found)} for request, found in known],
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(file: Path | None) -> tuple[Inventory, dict[Request, Activations]] | None:
    if file is None:
        return None
    try:
        digest, _, text = file.read_text("utf-8").partition("\n")
        if digest != _digest(text):
            return None
        known = json.loads(text)
        weights = tuple(Weight(**{**w, "shape": tuple(w["shape"])}) for w in known["inventory"]["weights"])
        inventory = Inventory(**{**known["inventory"], "weights": weights})
        peaks = {
            Request(**entry["request"]): Activations(
                Peak(**entry["found"]["before"]), Peak(**entry["found"]["in_layers"])
            )
            for entry in known["peaks"]
        }
    except (OSError, ValueError, TypeError, KeyError):
        return None
    with suppress(OSError):
        os.utime(file)  # what is used stays longest
    return inventory, peaks
