"""Private names of other packages, and their replacements, are used in only one file per package."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.cli import run_invocation
from portable.command_line import Invocation
from portable.errors import UserError
from portable.private import torch_internals, transformers_internals
from portable.private.bitsandbytes_internals import import_bitsandbytes
from tests.runs import configured

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "torch": "portable/private/torch_internals.py",
    "transformers": "portable/private/transformers_internals.py",
    "peft": "portable/private/peft_internals.py",
    "bitsandbytes": "portable/private/bitsandbytes_internals.py",
    "datasets": "portable/private/datasets_internals.py",
    "accelerate": "portable/private/accelerate_internals.py",
    "deepspeed": "gpu/zero/private_api.py",
    "torch_xla": "tpu/xla/torch_xla_internals.py",
    "torch_tpu": "tpu/torchtpu/torch_tpu_internals.py",
    **dict.fromkeys(("huggingface_hub", "safetensors", "tokenizers")),
}
"""The only file that may use private names of a package. The last packages need no file."""
ANY_MODULE = ("torch", "torch_xla")
"""Packages whose modules are public if no part of their name begins with an underscore."""
DOCUMENTED = {
    "datasets.logging",
    "deepspeed.accelerator",
    "deepspeed.accelerator.cpu_accelerator",
    "deepspeed.accelerator.cuda_accelerator",
    "deepspeed.comm",
    "deepspeed.ops.adam",
    "deepspeed.ops.op_builder",
    "deepspeed.utils",
    "huggingface_hub.constants",
    "huggingface_hub.errors",
    "huggingface_hub.utils",
    "peft.tuners.tuners_utils",
    "tokenizers.decoders",
    "tokenizers.models",
    "tokenizers.pre_tokenizers",
    "tokenizers.processors",
    "tokenizers.trainers",
}
"""In other packages, only the names of the package itself and of these modules are public, as their
documentation states."""
SETTINGS = ("torch.backends.", "torch.utils.deterministic.")
"""Attributes that users may set according to torch's documentation."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def product() -> list[Path]:
    return [path for room in ("portable", "converters", "gpu", "tpu") for path in (ROOT / room).rglob("*.py")]


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


@cache
def ours() -> frozenset[str]:
    """Return the private names that the product defines, because a class may inherit them."""
    return frozenset(name for path in product() for name in defined(tree_of(path)))


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def violations(tree: ast.Module, room_of: frozenset[str] = frozenset()) -> list[str]:
    """Return the uses of private names in a file that are allowed only in certain files.

    Args:
        tree: Syntax tree of the file.
        room_of: Packages whose private names the file may use.
    """
    packages = ROOMS.keys() - room_of
    names: dict[str, str] = {}  # full names of other packages by name in the file
    found: list[str] = []

    def full(node: ast.expr) -> str | None:
        """The full name of something of another package; None for anything else."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := full(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    def check(name: str) -> None:
        package, *parts = name.split(".")
        if package not in packages:
            return
        documented = package in ANY_MODULE or not parts or name in DOCUMENTED
        if not documented or any(private(part) for part in parts):
            found.append(f"import {name}")

    own = frozenset(defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                check(one.name)
                names[one.asname or one.name.partition(".")[0]] = (
                    one.name if one.asname else one.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            check(node.module)
            for one in node.names:
                names[one.asname or one.name] = f"{node.module}.{one.name}"
                if private(one.name) and node.module.partition(".")[0] in packages:
                    found.append(f"import {node.module}.{one.name}")
    for node in ast.walk(tree):  # another name for the same thing
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and (same := full(node.value)) is not None:
                    names.setdefault(target.id, same)
    for node in ast.walk(tree):
        reached: tuple[ast.expr, str] | None = None
        stored = False
        if isinstance(node, ast.Attribute):
            reached, stored = (node.value, node.attr), not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
                constant = name.value if isinstance(name, ast.Constant) else ""
                reached, stored = (node.args[0], str(constant)), node.func.id in ("setattr", "delattr")
        if reached is None:
            continue
        owner, attribute = reached
        whole = full(owner)
        told = f"{whole or ast.unparse(owner)}.{attribute}"
        package, _, module = (whole or "").partition(".")
        if private(attribute) and not room_of and package not in sys.stdlib_module_names:
            known = own | ours() if is_own(owner) else own
            if package in packages or attribute not in known:
                found.append(told)
        if module and module.islower():  # its names, reached through the package
            check(f"{package}.{module}")
        foreign = package in packages or (attribute == "__init__" and not room_of)
        if stored and foreign and not is_own(owner) and not told.startswith(SETTINGS):
            found.append(f"{told} = ")
    return found


def test_private_names_are_used_only_in_listed_files() -> None:
    rooms = {path: frozenset(name for name, room in ROOMS.items() if room == path) for path in ROOMS.values()}
    found = {
        path: told
        for file in product()
        if (told := violations(tree_of(file), rooms.get(path := str(file.relative_to(ROOT)), frozenset())))
    }
    assert not found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch.utils._pytree import tree_map", "import torch.utils._pytree"),
        ("import transformers.masking_utils as masks", "import transformers.masking_utils"),
        ("import peft\npeft.utils.constants.X", "import peft.utils"),
        ("def f(tensor): return tensor._spec", "tensor._spec"),
        ("class C:\n    def f(self): return self._buffers", "self._buffers"),
        ("def f(model): return getattr(model, '_no_split_modules', None)", "model._no_split_modules"),
        ("import torch\ntorch.compile = None", "torch.compile = "),
        ("from torch.nn import functional\nfunctional.linear = None", "torch.nn.functional.linear = "),
        ("def f(kind): kind.__init__ = None", "kind.__init__ = "),
    ],
)
def test_violations_finds_private_names(code: str, found: str) -> None:
    told = violations(ast.parse(code))
    assert any(found in one for one in told), told


def masked() -> None:
    # Otherwise, an earlier test may have filled the cache.
    transformers_internals._import_masking_module.cache_clear()
    with transformers_internals.skip_mask_value_checks():
        pass


@pytest.mark.parametrize(
    ("module", "name", "function", "feature"),
    [
        ("transformers.masking_utils", "is_tracing", masked, "training"),
        (
            "transformers.utils.chat_template_utils",
            "_compile_jinja_template",
            lambda: transformers_internals.compile_chat_template(""),
            "data.chat_template",
        ),
        (
            "torch",
            "_foreach_mul_",
            lambda: torch_internals.multiply_tensors_([], torch.ones(())),
            "precision: fp16",
        ),
    ],
)
def test_missing_private_name_is_one_line_error(
    module: str, name: str, function: Callable[[], Any], feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module(module), name)
    with pytest.raises(UserError) as raised:
        function()
    told, package = str(raised.value), module.partition(".")[0]
    installed = metadata.version(package)
    assert told.startswith(feature) and f"does not work with {package} {installed}" in told
    assert name in told and f"pip install '{package}==" in told and "\n" not in told


@pytest.mark.parametrize(
    ("package", "version", "extra", "settings"),
    [
        ("deepspeed", "0.18.3", "deepspeed", {"strategy": "zero2"}),
        ("bitsandbytes", None, "qlora", {"adapter__type": "lora", "adapter__base": "nf4"}),
    ],
)
def test_missing_or_old_extra_suggests_install(
    package: str,
    version: str | None,
    extra: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def installed(name: str) -> str:
        if name != package:
            return found(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    found = metadata.version
    monkeypatch.setattr(metadata, "version", installed)
    import_bitsandbytes.cache_clear()
    (tmp_path / "data.txt").write_text("some words " * 2000)
    config = configured(tmp_path / "run", tmp_path / "data.txt", **settings)
    with pytest.raises(UserError) as raised:
        run_invocation(Invocation(config, dry_run=True))
    told = str(raised.value)
    reason = "which is not installed" if version is None else f"but version {version} is installed"
    assert f"requires {package}>=" in told and reason in told
    assert f"pip install 'portable-trainer[{extra}]'" in told and not (tmp_path / "run").exists()
