"""The room for what other packages keep private: one module for each, and no other file uses such names.

``torch_internals``, ``transformers_internals`` and ``peft_internals`` are here,
``gpu/zero/private_api.py`` is DeepSpeed's,
``tpu/xla/torch_xla_internals.py`` torch_xla's, ``tpu/torchtpu/torch_tpu_internals.py`` torch_tpu's. A package
may rename what it keeps private in any release. Names are therefore looked up when they are used, so that
only what needs them ends, in one line (:meth:`Package.guard`). ``tests/test_private_names.py`` holds all
other files to public names.
"""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from functools import wraps
from importlib import metadata
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Function = TypeVar("Function", bound=Callable[..., Any])

_CALL = re.compile(r"\(\) (takes|got|missing) ")
"""In Python's words for arguments that a function does not have."""


class Package:
    """A package whose private names its room uses.

    Args:
        name: of the distribution.
        seen: the newest version that was seen to work.
    """

    def __init__(self, name: str, seen: str) -> None:
        self._name, self.seen = name, seen

    def check_installed(self, feature: str, extra: str) -> None:
        """Raise UserError unless a version is installed that ``extra`` of this distribution asks for."""
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet

        asked = map(Requirement, metadata.requires("portable-trainer") or ())
        wanted = next(
            (requirement.specifier for requirement in asked if requirement.name == self._name), SpecifierSet()
        )
        try:
            version = metadata.version(self._name)
        except metadata.PackageNotFoundError:
            version = "none"
        if version == "none" or not wanted.contains(version, prereleases=True):
            raise UserError(
                f"{feature} needs {self._name}{wanted}, and {version} is installed; install it with: "
                f"pip install 'portable-trainer[{extra}]'"
            )

    def guard(self, feature: str) -> Callable[[Function], Function]:
        """Decorate a function of a room, or one that makes a context manager.

        A name that is gone, or takes other arguments, raises UserError, if the room's own lines use it.
        Errors inside other packages stay as they are.
        """

        def decorate(function: Function) -> Function:
            file = function.__code__.co_filename

            def refuse(error: Exception) -> None:
                codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
                # These say that a name or module is missing where it is asked for.
                while codes[-1].co_name == "__getattr__" or "importlib" in codes[-1].co_filename:
                    codes.pop()
                here = codes[-1].co_filename == file
                if not here or (isinstance(error, TypeError) and not _CALL.search(str(error))):
                    return
                reason = re.sub(r" \((/|unknown location).*", "", to_one_line(error))
                raise UserError(
                    f"{feature}: does not work with {self._name} {metadata.version(self._name)} ({reason}); "
                    f"pip install '{self._name}=={self.seen.rpartition('.')[0]}.*'"
                ) from error

            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                except (ImportError, AttributeError, TypeError) as error:
                    refuse(error)
                    raise

            @wraps(function)
            def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
                try:
                    yield from function(*args, **kwargs)
                except (ImportError, AttributeError, TypeError) as error:
                    refuse(error)
                    raise

            chosen: Any = generate if inspect.isgeneratorfunction(function) else call
            wrapped: Function = chosen
            return wrapped

        return decorate

    def wrap_function(self, path: str, feature: str) -> Callable[..., Any]:
        """A function that calls the one called ``path``: ``module:name`` or ``module:name.name``."""
        module, _, name = path.partition(":")

        @self.guard(feature)
        def call(*args: Any, **kwargs: Any) -> Any:
            return attrgetter(name)(importlib.import_module(module))(*args, **kwargs)

        return call

    def wrap_attribute(self, name: str, feature: str, *default: Any) -> Callable[..., Any]:
        """A function that reads an attribute, or calls a method, of what it gets."""

        @self.guard(feature)
        def read(owner: Any, *args: Any, **kwargs: Any) -> Any:
            value = getattr(owner, name, *default)
            return value(*args, **kwargs) if args or kwargs else value

        return read
