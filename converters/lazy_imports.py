"""Names of a package (PEP 562) and whole modules that are imported at their first use."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def build_lazy_getattr(package: str) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: a name of its `__all__` comes from where `if TYPE_CHECKING` imports it.

    Every module of a package passes its `__init__`, and few need all that it offers: importing numpy takes
    longer than converting a small checkpoint.
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
    """The modules that the source of a package imports names from, by name."""
    import ast  # only where a name is asked for

    loader: Any = sys.modules[package].__loader__  # which reads archives, too
    imports = [
        node for node in ast.walk(ast.parse(loader.get_source(package))) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


class DeferredModule(ModuleType):
    """A module that is imported when one of its attributes is first read.

    `importlib.util.LazyLoader` is not safe in several threads before Python 3.12.
    """

    def __getattr__(self, name: str) -> Any:
        # Later reads of the attribute find it here and do not call this method.
        value = self.__dict__[name] = getattr(import_module(self.__name__), name)
        return value
