"""Load custom code: losses, metrics, callbacks, data sources, and functions that change the model.

A setting refers to custom code as ``package.module:name`` or, with arguments, as
``package.module:name(gamma=2.0)``. A class is instantiated with the arguments. A function receives
the arguments at each call.

:func:`portable.train` also accepts Python objects, and :func:`register_object` converts them to
such names. If a notebook or script defines the object, its source text is sent to the ranks, where
:func:`install_notebook_modules` creates a module from it. Nothing is pickled.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import inspect
import linecache
import os
import re
import symtable
import sys
import textwrap
import traceback
import types
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.similar_names import format_name_suggestion
from portable.errors import RunError, UserError, is_memory_error, to_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NOTEBOOK_MODULE_PREFIX = "notebook_"
"""Prefix of the names of modules that are created from the code of a notebook or script.

The rest of the name is a digest of the code.
"""
SOURCES_KEY = "plug-ins of this notebook"
"""Config key under which the source text of notebook modules is sent to the ranks.

See ``RunConfig.with_document``.
"""
_PLUGIN_NAME = re.compile(
    r"(?:(?P<module>[A-Za-z_][\w.]*):)?(?P<name>[A-Za-z_][\w.]*)\s*(?:\((?P<given>.*)\))?"
)
_SHOWN = 3  # maximum number of arguments in a message
_objects: dict[str, Any] = {}
"""Objects that :func:`register_object` has registered in this process, keyed by their names in settings."""


_explain_refusal: ContextVar[Callable[[str], str | None] | None] = ContextVar("_refused", default=None)


class CodeRefusedError(UserError):
    """Error raised if :func:`refuse_custom_code` forbids the import of a module."""


@contextmanager
def refuse_custom_code(explain_refusal: Callable[[str], str | None] | None) -> Iterator[None]:
    """Make :func:`load_plugin` and similar functions refuse modules within this context.

    These functions raise :class:`CodeRefusedError` instead of loading code from a module that
    ``explain_refusal`` rejects, even if the module was imported before. Python's ``import``
    statement is not affected. The function is stored in a context variable, and an inner context
    replaces the function of the outer context.

    Args:
        explain_refusal: Function that takes a module name, and returns the reason why the module must
            not be imported, or None if it may be imported. None to allow all modules.
    """
    token = _explain_refusal.set(explain_refusal)
    try:
        yield
    finally:
        _explain_refusal.reset(token)


def explain_foreign_module(name: str) -> str | None:
    """Explain why a config from outside the current folder must not import a module.

    Such a config may only import modules in the current folder or in a PYTHONPATH folder.
    Otherwise, its author could run code of any installed package. Modules that
    :func:`install_notebook_modules` creates are also allowed. To enforce the rule, pass this
    function to :func:`refuse_custom_code`.

    Args:
        name: Name of the module.

    Returns:
        The reason, or None if the module may be imported.
    """
    if name.startswith(NOTEBOOK_MODULE_PREFIX):
        return None
    project_folders = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if PathFinder.find_spec(name.partition(".")[0], project_folders) is not None:
        return None
    return (
        "is not run, because the code is not in this folder or on PYTHONPATH, and the config is in "
        "another folder; if you trust the config and the code, copy the config into this folder"
    )


@dataclass(frozen=True)
class PluginSpec:
    """Parsed value of a setting that refers to custom code or a built-in object.

    ``str()`` converts it back to the value of the setting.

    Attributes:
        module: Name of the module. None if the value is a built-in name of the setting, such as
            ``DPO``.
        name: Name of the object in the module, possibly dotted.
        arguments: Numbers, strings and other Python literals, keyed by argument name.
    """

    module: str | None
    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        arguments_text = ", ".join(f"{key}={value!r}" for key, value in sorted(self.arguments.items()))
        start = "" if self.module is None else f"{self.module}:"
        return start + self.name + (f"({arguments_text})" if arguments_text else "")


def parse_plugin_spec(text: str) -> PluginSpec:
    """Parse the value of a setting that refers to custom code or a built-in object.

    Args:
        text: Value such as ``package.module:name(gamma=2.0)``. The module and the arguments are
            optional. Each argument must have a name, and its value must be a Python literal.

    Raises:
        ValueError: If ``text`` does not have this format.
    """
    match = _PLUGIN_NAME.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not the name of a class or function; write package.module:name or "
            "package.module:name(argument=value)"
        )
    arguments: dict[str, Any] = {}
    if arguments_text := match["given"]:
        try:
            call = ast.parse(f"_({arguments_text})", mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                raise ValueError("more than one pair of parentheses")
            if call.args:
                raise ValueError("an argument has no name")
            for keyword in call.keywords:
                if keyword.arg is None:
                    raise ValueError("an argument has no name")
                if keyword.arg in arguments:
                    raise ValueError(f"{keyword.arg} is specified twice")
                arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{text!r}: the arguments cannot be read ({error}); write each argument as name=value with a "
                "Python literal, such as gamma=2.0"
            ) from error
    return PluginSpec(match["module"], match["name"], arguments)


def is_plugin_name(text: object) -> bool:
    """Return whether a setting's value names custom code, in the form ``package.module:name``.

    Arguments may follow, as in ``package.module:name(gamma=2.0)``. Returns False for paths and for
    built-in names.
    """
    if not isinstance(text, str):
        return False
    match = _PLUGIN_NAME.fullmatch(text.strip())
    return match is not None and match["module"] is not None


def load_plugin(
    key: str, text: str, builtin_paths: Mapping[str, str] | None = None, default: str | None = None
) -> Any:
    """Load the object that a setting refers to.

    Args:
        key: Setting, used in error messages.
        text: Value of the setting.
        builtin_paths: Built-in objects of the setting as ``package.module:name``, keyed by their short
            names. None if the setting has no built-in objects.
        default: Meaning of a null value, used in error messages. None if the setting cannot be null.

    Returns:
        For a class, an instance of the class. For a function, the function itself, or a partial if
        ``text`` contains arguments. Other objects are returned unchanged. An object that was passed to
        :func:`register_object` in this process is returned without an import.

    Raises:
        UserError: If the object does not exist, if its module cannot be imported, if the object
            does not accept the arguments, or if the constructor of a class fails.
    """
    spec = parse_setting_spec(key, text)
    if str(spec) in _objects:
        return _objects[str(spec)]
    context = f"{key}: {text}"
    if spec.module is None:
        if spec.name not in (builtin_paths or {}):
            names = [*(builtin_paths or ()), *([] if default is None else [f"null for {default}"])]
            if not names:
                raise UserError(f"{context}: does not refer to custom code; use package.module:name")
            raise UserError(
                f"{context}: unknown name; use {', '.join(names)}, or package.module:name for custom code"
                f"{format_name_suggestion(spec.name, builtin_paths or {})}"
            )
        builtin_spec = parse_plugin_spec((builtin_paths or {})[spec.name])
        spec = PluginSpec(builtin_spec.module, builtin_spec.name, spec.arguments)
    target = _find_object(context, spec)
    return _create_object(context, target, spec.arguments)


def load_plugin_factory(key: str, text: str) -> Callable[..., Any]:
    """Load the function or class that a setting refers to, without calling it.

    The caller adds its own arguments and calls the result. Unlike :func:`load_plugin`, this function
    does not instantiate a class.

    Args:
        key: Setting, used in error messages.
        text: Value of the setting. It must contain the name of a module, because built-in names are
            not supported.

    Returns:
        The function or class, or a partial of it if ``text`` contains arguments.

    Raises:
        UserError: If the module cannot be imported, if the object does not exist or is not
            callable, or if it does not accept the arguments.
    """
    spec, context = parse_setting_spec(key, text), f"{key}: {text}"
    target = _objects.get(str(spec))
    if target is None:
        target = _find_object(context, spec)
    if not callable(target):
        raise UserError(f"{context}: is an object of type {type(target).__name__}; use a class or a function")
    factory: Callable[..., Any] = target
    if isinstance(factory, functools.partial) or not spec.arguments:
        return factory
    _check_arguments(context, factory, spec.arguments, all_of_them=False)
    return functools.partial(factory, **spec.arguments)


def load_plugin_value(key: str, text: str) -> Any:
    """Load the object that a setting refers to, and call the object if it is callable.

    For a class, the object is an instance of the class.

    Args:
        key: Setting, used in error messages.
        text: Value of the setting.

    Returns:
        The result of the call. The object itself if it is not callable.

    Raises:
        UserError: If the object does not exist, if it cannot be created, or if the call fails.
    """
    target = load_plugin(key, text)
    with convert_user_errors(f"{key}: {text}"):
        return target() if callable(target) else target


def parse_setting_spec(key: str, text: str) -> PluginSpec:
    """Parse the value of the setting ``key`` with :func:`parse_plugin_spec`.

    Raises:
        UserError: If the value is invalid. The message contains the name of the setting.
    """
    try:
        return parse_plugin_spec(text)
    except ValueError as error:
        raise UserError(f"{key}: {to_one_line(error)}") from error


def _find_object(context: str, spec: PluginSpec) -> Any:
    """Import the module of a spec, and return the object that the spec refers to.

    Args:
        context: Beginning of the error message.
        spec: Parsed value of a setting. Its module must not be None.

    Raises:
        UserError: If the module cannot be imported or does not contain the object.
    """
    assert spec.module is not None
    target = _import_module(context, spec.module)
    for part in spec.name.split("."):
        try:
            target = getattr(target, part)
        except AttributeError as error:
            public = [name for name in dir(target) if not name.startswith("_")]
            raise UserError(
                f"{context}: {spec.module} has no "
                f"{spec.name}{format_name_suggestion(part, public) or '; correct the name'}"
            ) from error
    return target


def check_code_may_run(context: str, name: str) -> None:
    """Check that a module may be imported within the current :func:`refuse_custom_code` context.

    Outside of such a context, all modules may be imported.

    Args:
        context: Beginning of the error message.
        name: Name of the module.

    Raises:
        CodeRefusedError: If the module must not be imported.
    """
    if (explain_refusal := _explain_refusal.get()) is not None and (
        reason := explain_refusal(name)
    ) is not None:
        raise CodeRefusedError(f"{context}: {reason}")


def _import_module(context: str, name: str) -> types.ModuleType:
    """Import a module from the module search path or the current folder.

    The current folder is appended to ``sys.path``.

    Args:
        context: Beginning of the error message.
        name: Name of the module.

    Raises:
        UserError: If the module cannot be imported.
        CodeRefusedError: If the current :func:`refuse_custom_code` context forbids the import.
    """
    check_code_may_run(context, name)
    if name.startswith(NOTEBOOK_MODULE_PREFIX) and name not in sys.modules:
        raise UserError(
            f"{context}: was defined in a notebook or script; start the run from this notebook or script"
        )
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:  # Python does the same for a script in the current folder
        sys.path.append(current_folder)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing may raise any exception
        suggestion = ""
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            suggestion = format_name_suggestion(name, [path.stem for path in Path.cwd().glob("*.py")])
        remedy = "correct the module, or install the packages that it imports"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            remedy = "specify a module in this folder or on PYTHONPATH, as package.module:name"
        raise UserError(
            f"{context}: cannot be imported ({type(error).__name__}: {to_one_line(error)}); "
            f"{remedy}{suggestion}"
        ) from error


def _create_object(context: str, target: Any, arguments: Mapping[str, Any]) -> Any:
    """Create the object that a setting describes, such as ``package.module:name(gamma=2.0)``.

    A class is instantiated with the arguments. For a function, the arguments are bound. Any other
    object is returned unchanged.

    Args:
        context: Beginning of the error message.
        target: Object that the setting names.
        arguments: Arguments in the setting, keyed by name.

    Returns:
        An instance of the class, or a partial of the function. ``target`` itself if it is not
        callable, or if it is a function and there are no arguments.

    Raises:
        UserError: If ``target`` does not accept the arguments, or if the constructor fails.
    """
    if not callable(target):
        if arguments:
            raise UserError(
                f"{context}: is an object of type {type(target).__name__}, which takes no arguments; remove "
                "the arguments"
            )
        return target
    if not inspect.isclass(target) and not arguments:
        return target
    _check_arguments(context, target, arguments, all_of_them=inspect.isclass(target))
    if not inspect.isclass(target):
        return functools.update_wrapper(functools.partial(target, **arguments), target)
    try:
        return target(**arguments)
    except (UserError, RunError):
        raise
    except (Exception, SystemExit) as error:  # custom code may raise anything
        raise UserError(
            f"{context}: cannot be created ({_describe_error_in_user_code(error)}); correct the code or the "
            "arguments"
        ) from error


def _check_arguments(context: str, target: Any, arguments: Mapping[str, Any], *, all_of_them: bool) -> None:
    """Raise UserError if ``target`` does not accept the arguments.

    Nothing is checked if Python cannot determine the signature, as for some C functions.

    Args:
        context: Beginning of the error message.
        target: Function or class that a setting names.
        arguments: Arguments that the setting passes to ``target``, keyed by name.
        all_of_them: Whether the arguments must include all required arguments. False if the caller
            adds more arguments later.
    """
    try:
        signature = inspect.signature(target)
        signature.bind(**arguments) if all_of_them else signature.bind_partial(**arguments)
    except TypeError as error:
        takes = list(inspect.signature(target).parameters)
        wrong = next((name for name in arguments if name not in takes), "")
        raise UserError(
            f"{context}: "
            f"{to_one_line(error)}{format_name_suggestion(wrong, takes) or '; correct the arguments'}"
        ) from error
    except ValueError:  # Python cannot determine the signature
        pass


@contextmanager
def convert_user_errors(context: str) -> Iterator[None]:
    """Convert errors that custom code raises within this context to UserError.

    Out-of-memory errors are not converted, because the run reports them with a remedy. UserErrors and
    RunErrors are raised unchanged.

    Args:
        context: Beginning of the error message.

    Raises:
        UserError: If the code raises an exception or calls ``sys.exit``.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except (Exception, SystemExit) as error:
        if is_memory_error(error):  # the run reports this error with a remedy
            raise
        raise UserError(
            f"{context}: raises an error ({_describe_error_in_user_code(error)}); correct the code"
        ) from error


def _describe_error_in_user_code(error: BaseException) -> str:
    """Describe an error in custom code on one line: its type, its message, and the file and line."""
    frame = _find_user_frame(traceback.extract_tb(error.__traceback__))
    location = "" if frame is None else f"; {Path(frame.filename).name}, line {frame.lineno}"
    return f"{type(error).__name__}: {to_one_line(error)}{location}"


def _find_user_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Find the innermost frame in custom code, which is the code that the user can correct.

    Usually, custom code is all code outside of this project, the standard library and installed
    packages. If the traceback has no such frame, the config must name custom code in an installed
    package. In this case, custom code is the outermost package on the stack that is not in
    :data:`_FRAMEWORKS`.

    Args:
        frames: Frames of a traceback, the innermost last.

    Returns:
        The innermost frame in custom code. If there is none, the innermost frame outside of this
        project, or else the innermost frame. None if there are no frames.
    """
    others = [frame for frame in frames if not frame.filename.startswith(_OWN_FOLDER)]
    packages = {frame.filename: _find_library(frame.filename) for frame in others}
    user_frames = [frame for frame in others if packages[frame.filename] is None]
    if not user_frames:  # the setting names code of an installed package
        entry = next((name for name in packages.values() if name not in _FRAMEWORKS), None)
        user_frames = [frame for frame in others if packages[frame.filename] == entry]
    return next(reversed(user_frames or others or list(frames)), None)


_OWN_FOLDER = f"{Path(__file__).parent}{os.sep}"
_STANDARD_LIBRARY = "standard library"
_FRAMEWORKS = frozenset({
    _STANDARD_LIBRARY, "torch", "transformers", "peft", "accelerate", "deepspeed", "numpy", "datasets",
    "pandas", "pyarrow", "tokenizers", "torch_xla", "torch_tpu", "functorch", "jinja2", "triton",
})  # fmt: skip
"""Packages that call custom code, and whose own frames therefore do not count as custom code."""


def _find_library(filename: str) -> str | None:
    """Find the installed package that a file belongs to.

    Args:
        filename: File name of a frame in a traceback.

    Returns:
        The folder name of the package, or :data:`_STANDARD_LIBRARY`. None if the file is in neither an
        installed package nor the standard library.
    """
    parts = Path(filename).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    standard = str(Path(os.__file__).parent) + os.sep
    return _STANDARD_LIBRARY if filename.startswith((standard, "<frozen ")) else None


# -- identity ----------------------------------------------------------------------------------------------


def compute_plugin_digest(text: str) -> str:
    """Compute a digest of the module that contains a setting's custom code.

    The digest shows whether the code has changed since a checkpoint was saved. Comments and layout
    are ignored. The module is imported. The modules that it imports and the arguments in the
    setting do not affect the digest.

    Args:
        text: Value of the setting.

    Returns:
        The digest, in hexadecimal. Empty for built-in names, for code in this project, and if the
        module cannot be imported or has no source text.
    """
    try:
        module = parse_plugin_spec(text).module
    except ValueError:
        return ""
    if module is None or module.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    try:
        return _compute_code_digest(inspect.getsource(_import_module("", module)))
    except (UserError, OSError, TypeError):  # compiled code has no source
        return ""


def _compute_code_digest(source: str) -> str:
    """Compute a digest of Python source code that ignores comments and layout.

    The digest does not depend on the version of Python.
    """
    return hashlib.blake2b(_dump_syntax(ast.parse(source)).encode(), digest_size=6).hexdigest()


def _dump_syntax(value: Any) -> str:
    """Format a syntax tree, or the value of a field, as ``ast.dump`` of Python 3.11 does.

    The result of ``ast.dump`` itself differs between versions. Python 3.12 has added the field
    ``type_params``, and Python 3.13 omits empty lists.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_dump_syntax, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [
        f"{name}={_dump_syntax(item)}"
        for name, item in ast.iter_fields(value)
        if not (item is None and getattr(type(value), name, ...) is None)
        and not (name == "type_params" and not item)
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


# -- objects -----------------------------------------------------------------------------------------------


def register_object(
    argument_name: str, user_object: Any, sources: dict[str, str], *, instantiates_class: bool = True
) -> str:
    """Register an object in this process, and return a name that the ranks can use to find it.

    Args:
        argument_name: Argument of :func:`portable.train`, used in error messages.
        user_object: Function, class, ``functools.partial`` of a function or class, or instance of a
            dataclass. A string is returned unchanged, because it is already a name.
        sources: Source code of modules, keyed by module name. Modified in place: if a notebook or
            script defines the object, a module is added.
        instantiates_class: Whether to create an instance of a class, or of a partial of a class, and
            register the instance, for :func:`load_plugin`. If False, the class or partial itself is
            registered, for :func:`load_plugin_factory`.

    Returns:
        The name, such as ``package.module:name(gamma=2.0)``.

    Raises:
        UserError: If the ranks could not create the same object from the name, or if a constructor
            fails or does not accept the arguments.
    """
    if isinstance(user_object, str):
        return user_object
    arguments: dict[str, Any] = {}
    target = user_object
    if isinstance(user_object, functools.partial):
        if user_object.args:
            raise UserError(
                f"{argument_name}: is a functools.partial with positional arguments; pass the arguments by "
                "name"
            )
        target, arguments = user_object.func, dict(user_object.keywords)
        if not hasattr(target, "__qualname__"):
            raise UserError(
                f"{argument_name}: is a functools.partial of an object of type {type(target).__name__}; pass "
                "a functools.partial of a function or class"
            )
    elif not inspect.isclass(user_object) and not inspect.isfunction(user_object):
        target = type(user_object)
        if dataclasses.is_dataclass(user_object):
            arguments = {
                field.name: getattr(user_object, field.name)
                for field in dataclasses.fields(user_object)
                if field.init and not _is_default(field, getattr(user_object, field.name))
            }
        elif vars(user_object) if hasattr(user_object, "__dict__") else True:
            raise UserError(
                f"{argument_name}: the ranks cannot recreate this instance of {target.__name__}; make "
                f"{target.__name__} a dataclass, or pass the class itself"
            )
    for name, value in arguments.items():
        if not _is_plain(value):
            raise UserError(
                f"{argument_name}: {getattr(target, '__name__', target)}: {name} is an object of type "
                f"{type(value).__name__}, which cannot be sent to the ranks; use numbers, strings, lists "
                "or dicts"
            )
    module, name = target.__module__, target.__qualname__
    if module == "__main__" or "<locals>" in name or "<lambda>" in name:
        text = _build_source_with_globals(argument_name, target)
        module = f"{NOTEBOOK_MODULE_PREFIX}{_compute_code_digest(text)}"
        sources[module] = text
    elif _find_imported(module, name) is not target:
        raise UserError(
            f"{argument_name}: the ranks cannot import the object as {module}:{name}; define the object "
            "at the top level of a module"
        )
    full_name = str(PluginSpec(module, name, arguments))
    if instantiates_class and (inspect.isclass(user_object) or isinstance(user_object, functools.partial)):
        user_object = _create_object(f"{argument_name}: {target.__name__}", target, arguments)
    _objects[full_name] = user_object
    return full_name


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return whether a value is the default of a dataclass field.

    Returns False if the field has a ``default_factory`` instead of a default. Values are compared
    by identity.
    """
    return field.default is not dataclasses.MISSING and value is field.default


def _find_imported(module: str, name: str) -> Any:
    """Find an object by its dotted name in an already imported module, or return None if it is missing."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _is_plain(value: Any) -> bool:
    """Return whether the ``repr`` of a value is a Python literal that evaluates to an equal value."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _build_source_with_globals(key: str, target: Any) -> str:
    """Build the source code of a module that contains ``target`` and everything that it uses.

    Args:
        key: Argument of :func:`portable.train`, used in error messages.
        target: Function or class in a notebook or script.

    Raises:
        UserError: If the source cannot be read, or if it uses an object that the ranks cannot
            recreate, such as a lambda or an open file.
    """
    source_by_name: dict[str, str] = {}
    _add_sources_of(key, target, source_by_name)
    return "from __future__ import annotations\n\n" + "\n\n".join(source_by_name.values()) + "\n"


def _add_sources_of(key: str, target: Any, source_by_name: dict[str, str]) -> None:
    """Add the source code of ``target`` and of everything it uses to ``source_by_name``.

    Definitions that ``target`` uses are added first, so that the code can be executed from top to
    bottom. They are imports, constants, functions and classes of the same notebook or script.
    ``target`` may use them directly or through other functions.

    Args:
        key: Argument of :func:`portable.train`, used in error messages.
        target: Function or class in a notebook or script.
        source_by_name: Source code that defines each global name, in the order of execution.
            Modified in place.

    Raises:
        UserError: If the source cannot be read, or uses an object that the ranks cannot create.
    """
    name = target.__name__
    if name in source_by_name:
        return
    if name == "<lambda>":
        raise UserError(f"{key}: uses or is a lambda, which the ranks cannot import; use def instead")
    if "<" in target.__qualname__:
        raise UserError(
            f"{key}: {name} is defined inside a function; define {name} at the top level of a module"
        )
    text = _get_source(target)
    if text is None:
        raise UserError(f"{key}: the source code of {name} cannot be read; define {name} in a module")
    source_by_name[name] = ""  # reserve the name, because a function may call itself
    space = vars(sys.modules[target.__module__])
    before: dict[str, str] = {}
    for used in sorted(_list_used_names(text)):
        if used == name or used not in space:
            continue
        value = space[used]
        if isinstance(value, types.ModuleType):
            alias = "" if value.__name__ == used else f" as {used}"
            before[used] = f"import {value.__name__}{alias}"
        elif getattr(value, "__module__", None) == target.__module__ and hasattr(value, "__qualname__"):
            _add_sources_of(key, value, source_by_name)
            if used != (definition := str(value.__name__)):
                # Another decorated function, or an older definition, may have the same name.
                if space.get(definition) is not value:
                    raise _build_variable_error(key, name, used, value)
                # The definition may not be complete yet, because functions may call each other.
                alias_line = f"\n{used} = {definition}\n"
                if alias_line not in source_by_name[definition]:
                    source_by_name[definition] += alias_line
        elif hasattr(value, "__module__") and hasattr(value, "__qualname__"):
            before[used] = f"from {value.__module__} import {value.__qualname__} as {used}"
        elif _is_plain(value):
            before[used] = f"{used} = {value!r}"
        elif type(value).__module__ == "__future__":
            continue
        else:
            raise _build_variable_error(key, name, used, value)
    alias_lines = source_by_name.pop(name)
    source_by_name |= {used: line for used, line in before.items() if used not in source_by_name}
    source_by_name[name] = text + alias_lines


def _build_variable_error(key: str, name: str, used: str, value: Any) -> UserError:
    """Build the error for a global variable that the ranks cannot recreate.

    Args:
        key: Argument of :func:`portable.train`.
        name: Name of the function or class that uses the variable.
        used: Name of the variable.
        value: Value of the variable.
    """
    return UserError(
        f"{key}: {name} uses the variable {used} (type {type(value).__name__}) of the notebook or script, "
        f"which the ranks do not have; define {name} and {used} in a module"
    )


def _get_source(target: Any) -> str | None:
    """Return the source code of a function or class without indentation, or None if it cannot be found.

    Unlike ``inspect.getsource``, this function also finds classes defined in a notebook.
    """
    try:
        return textwrap.dedent(inspect.getsource(target))
    except (OSError, TypeError):
        pass
    if not inspect.isclass(target):
        return None
    # Python cannot find a class of a notebook, because cells are not files. First search the cells that the
    # code objects of the methods refer to. Then search all cells, the newest first, because a class may have
    # no methods.
    files = [
        getattr(getattr(member, "__code__", None), "co_filename", "") for member in vars(target).values()
    ]
    cells = [name for name in reversed([*linecache.cache]) if not Path(name).is_file()]
    for file in (*filter(None, files), *cells):
        cell = "".join(linecache.getlines(file))
        if f"class {target.__name__}" not in cell:
            continue
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ClassDef) and node.name == target.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                lines = cell.splitlines(keepends=True)[first - 1 : node.end_lineno]
                return textwrap.dedent("".join(lines))
    return None


def _list_used_names(text: str) -> set[str]:
    """Return the names of all global variables that a source text uses or defines.

    Local variables of functions are omitted. Attributes of a class are included if the class body
    reads them, because a statement such as ``SCALE = SCALE`` reads the global variable.
    """
    tables = [symtable.symtable(text, "<source>", "exec")]
    names: set[str] = set()
    for table in tables:
        tables.extend(table.get_children())
        names |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_global() or (table.get_type() == "class" and symbol.is_referenced())
        }
    return names


def get_notebook_sources() -> dict[str, str]:
    """Return the source code of the modules from :func:`install_notebook_modules`, keyed by module name."""
    names = [name for name in [*sys.modules] if name.startswith(NOTEBOOK_MODULE_PREFIX)]
    return {name: "".join(linecache.getlines(f"<{name}>")) for name in names}


def install_notebook_modules(sources: Mapping[str, str]) -> None:
    """Create modules from the source code of a notebook or script, so that this process can import them.

    Modules that already exist are skipped.

    Args:
        sources: Source code, keyed by module name. See :func:`register_object`.

    Raises:
        UserError: If the code cannot be executed.
    """
    for name, text in sources.items():
        if name in sys.modules:
            continue
        module = types.ModuleType(name)
        file = f"<{name}>"
        module.__file__ = file
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        sys.modules[name] = module
        try:
            exec(compile(text, file, "exec"), vars(module))
        except Exception as error:
            del sys.modules[name]
            raise UserError(
                "code of the notebook or script raises an error on a rank "
                f"({_describe_error_in_user_code(error)}); "
                "move the function or class to a module"
            ) from error


def build_python_command(code: str, *arguments: str) -> list[str]:
    """Build the command that runs ``code`` in a new Python process with the same module search path.

    The search path is set explicitly. Otherwise, a new Python process would first search the current
    folder, and a file there could shadow an installed module.

    Args:
        code: Python code to run after ``portable`` is imported.
        arguments: Values for ``sys.argv[1:]``.

    Returns:
        The command for :mod:`subprocess`.
    """
    paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 (a str, as the others)
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; import portable; {code}", *arguments]
