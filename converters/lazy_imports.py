"""Import modules, and the attributes that a package exports (PEP 562), when they are first used."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def build_lazy_getattr(package: str) -> Callable[[str], Any]:
    """Build a package's `__getattr__`, which imports a name in `__all__` when the name is first used.

    Importing a submodule also runs the `__init__` of its package. If `__init__` imported all public
    names, it would load numpy, which takes longer than converting a small checkpoint. The package
    therefore lists its imports below `if TYPE_CHECKING`. The returned function parses this list to
    find the module of a name.

    Args:
        package: Name of the package.

    Returns:
        The function to assign to `__getattr__`. It stores each value in the package, so it is
        called once per name. For a name that is not in `__all__`, it raises `AttributeError`.
    """

    def get_attribute(name: str) -> Any:
        module = sys.modules[package]
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; check the name")
        value = vars(module)[name] = getattr(import_module(_find_modules_of_names(package)[name]), name)
        return value

    return get_attribute


@cache
def _find_modules_of_names(package: str) -> dict[str, str]:
    """Map each name that a package's source imports to the name's module.

    For example, `from a.b import c` maps `c` to `a.b`. Other forms of imports, new names after
    `as`, and the dots of relative imports are ignored. The result is cached.
    """
    import ast  # not at the top, because only the first use of a name needs it

    loader: Any = sys.modules[package].__loader__  # also reads the source of a package in a zip archive
    imports = [
        node for node in ast.walk(ast.parse(loader.get_source(package))) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


class DeferredModule(ModuleType):
    """Module that is imported when one of its attributes is first read.

    This class replaces `importlib.util.LazyLoader`, which is not thread-safe before Python 3.12.
    """

    def __getattr__(self, name: str) -> Any:
        """Import the module, and return one of its attributes.

        The attribute is then cached, so that later reads of it do not call this method.
        """
        value = self.__dict__[name] = getattr(import_module(self.__name__), name)
        return value
