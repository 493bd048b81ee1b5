"""Import modules, and the names of a package (PEP 562), when they are first used."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def build_lazy_getattr(package: str) -> Callable[[str], Any]:
    """Build a package's `__getattr__`, which imports the names in `__all__` when they are first used.

    Every import of a submodule runs the `__init__` of its package. Without lazy imports, this would
    import numpy, which takes longer than the conversion of a small checkpoint. The module of each name
    is parsed from the imports below `if TYPE_CHECKING` in the package's source.

    Args:
        package: Name of the package.

    Returns:
        The function to assign to `__getattr__`.
    """

    def get_attribute(name: str) -> Any:
        module = sys.modules[package]
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(module)[name] = getattr(import_module(_find_modules_of_names(package)[name]), name)
        return value

    return get_attribute


@cache
def _find_modules_of_names(package: str) -> dict[str, str]:
    """Parse the imports in a package's source, and return the module of each imported name. Cached."""
    import ast  # not at the top, because only the first use of a name needs it

    loader: Any = sys.modules[package].__loader__  # also reads the source of a package in a zip archive
    imports = [
        node for node in ast.walk(ast.parse(loader.get_source(package))) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


class DeferredModule(ModuleType):
    """Module that is imported when one of its attributes is first read.

    `importlib.util.LazyLoader` is not thread-safe before Python 3.12.
    """

    def __getattr__(self, name: str) -> Any:
        """Import the module, and return one of its attributes, which is stored for later reads."""
        # Store the attribute, so that later reads of it do not call this method.
        value = self.__dict__[name] = getattr(import_module(self.__name__), name)
        return value
