"""Access to private names of other packages, with one module per package.

No other module may use private names. ``tests/test_private_names.py`` enforces this rule. The
modules for torch, transformers, peft, bitsandbytes, datasets and Accelerate are in this folder. The
module for DeepSpeed is ``gpu/zero/private_api.py``, the module for torch_xla is
``tpu/xla/torch_xla_internals.py``, and the module for torch_tpu is
``tpu/torchtpu/torch_tpu_internals.py``.

A package may rename its private names in any release. The modules therefore resolve names only when
they are used. A missing name then affects only the feature that needs it, with a one-line error
message (:meth:`GuardedPackage.explain_missing_names`).
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

_WRONG_ARGUMENTS_MESSAGE = re.compile(r"\(\) (takes|got|missing) ")
"""Pattern that matches the message of a TypeError about arguments that a function does not accept."""


class GuardedPackage:
    """Third-party package with private names that a module of this project uses.

    A private name may be missing in another version of the package. The methods of this class wrap
    code that uses such names, so that a missing name raises UserError with a remedy.

    Args:
        name: Name of the distribution.
        tested_version: Newest version with which the names were tested, used in error messages.
    """

    def __init__(self, name: str, tested_version: str) -> None:
        self._name, self.tested_version = name, tested_version

    def check_installed(self, feature: str, extra: str) -> None:
        """Check that the package is installed in a version that portable-trainer supports.

        Args:
            feature: Setting or feature that needs the package. The error message begins with it.
            extra: Extra of portable-trainer that installs the package.

        Raises:
            UserError: If the package is missing or its version is not supported.
        """
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet

        requirements = map(Requirement, metadata.requires("portable-trainer") or ())
        required_versions = next(
            (requirement.specifier for requirement in requirements if requirement.name == self._name),
            SpecifierSet(),
        )
        remedy = f"install a supported version with: pip install 'portable-trainer[{extra}]'"
        try:
            version = metadata.version(self._name)
        except metadata.PackageNotFoundError:
            raise UserError(
                f"{feature}: requires {self._name}{required_versions}, which is not installed; {remedy}"
            ) from None
        if not required_versions.contains(version, prereleases=True):
            raise UserError(
                f"{feature}: requires {self._name}{required_versions}, but version {version} is installed; "
                f"{remedy}"
            )

    def explain_missing_names(self, feature: str) -> Callable[[Function], Function]:
        """Return a decorator that raises UserError if the installed package lacks a name or argument.

        It can decorate functions and generators. The decorator converts an ImportError or
        AttributeError, and a TypeError about arguments that a function does not accept. It does
        this only if code in the file of the decorated function raised the error. Errors inside
        other packages are raised unchanged.

        Args:
            feature: Feature that does not work without the name, used in the error message.
        """

        def decorate(function: Function) -> Function:
            file = function.__code__.co_filename

            def raise_if_name_is_missing(error: Exception) -> None:
                """Raise UserError if ``error`` shows that a name is missing or has a new signature.

                A call of ``function``, the decorated function, raised ``error``. This function
                returns normally if the error comes from code outside the file of ``function``. It
                also returns normally if ``error`` is a TypeError whose message is not about the
                arguments of a call.
                """
                codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
                # The frames of __getattr__ and importlib only report that a name or module does not exist.
                while codes[-1].co_name == "__getattr__" or "importlib" in codes[-1].co_filename:
                    codes.pop()
                here = codes[-1].co_filename == file
                if not here or (
                    isinstance(error, TypeError) and not _WRONG_ARGUMENTS_MESSAGE.search(str(error))
                ):
                    return
                reason = re.sub(r" \((/|unknown location).*", "", to_one_line(error))
                raise UserError(
                    f"{feature}: does not work with {self._name} {metadata.version(self._name)} "
                    f"({reason}); run: pip install "
                    f"'{self._name}=={self.tested_version.rpartition('.')[0]}.*'"
                ) from error

            @wraps(function)
            def call_guarded(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                except (ImportError, AttributeError, TypeError) as error:
                    raise_if_name_is_missing(error)
                    raise

            @wraps(function)
            def generate_guarded(*args: Any, **kwargs: Any) -> Iterator[Any]:
                try:
                    yield from function(*args, **kwargs)
                except (ImportError, AttributeError, TypeError) as error:
                    raise_if_name_is_missing(error)
                    raise

            chosen: Any = generate_guarded if inspect.isgeneratorfunction(function) else call_guarded
            wrapped: Function = chosen
            return wrapped

        return decorate

    def wrap_private_function(self, path: str, feature: str) -> Callable[..., Any]:
        """Return a wrapper that calls a private function of the package.

        Each call of the wrapper imports the function. If the function is missing, the call raises
        UserError. See :meth:`explain_missing_names`.

        Args:
            path: Location of the function, as ``module:name`` or ``module:name.name``.
            feature: Feature that needs the function, used in the error message.
        """
        module, _, name = path.partition(":")

        @self.explain_missing_names(feature)
        def call(*args: Any, **kwargs: Any) -> Any:
            return attrgetter(name)(importlib.import_module(module))(*args, **kwargs)

        return call

    def wrap_private_attribute(self, name: str, feature: str, *default: Any) -> Callable[..., Any]:
        """Return a function that reads a private attribute of its first argument.

        If the function receives further arguments, it calls the attribute with them and returns the
        result. If the attribute is missing, the function raises UserError. See
        :meth:`explain_missing_names`.

        Args:
            name: Name of the attribute.
            feature: Feature that needs the attribute, used in the error message.
            default: Optional single value to use if the attribute is missing. The function then
                raises no error.
        """

        @self.explain_missing_names(feature)
        def read(owner: Any, *args: Any, **kwargs: Any) -> Any:
            value = getattr(owner, name, *default)
            return value(*args, **kwargs) if args or kwargs else value

        return read
