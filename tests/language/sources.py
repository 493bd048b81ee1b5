"""Python files and Markdown pages of the project, parsed once for all measures."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = ("portable", "converters", "gpu", "tpu")
CODE = (*PRODUCT, "tests", "benchmarks")
DOCS = "docs"
PACKAGES = (*CODE, DOCS)

GUIDES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
GENERATED_PAGES = ("config.md", "promises.md")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourceError(Exception):
    """A file cannot be read or parsed."""


@dataclass
class Nodes:
    """Syntax nodes of a module that the measures read, collected in one traversal.

    Attributes:
        strings: String constants that are statements: docstrings and attribute docstrings.
        functions: Functions and methods.
        classes: Classes.
        calls: Calls.
        locals: Names that a function or a comprehension binds, each with its line number.
    """

    strings: list[ast.Constant] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    classes: list[ast.ClassDef] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)
    locals: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """A file to measure.

    Attributes:
        path: Path relative to the root of the project, with forward slashes.
        package: Element of `PACKAGES` that the file belongs to.
        text: Content of the file.
        nodes: Syntax nodes of a Python file. None for a Markdown page.
    """

    path: str
    package: str
    text: str
    nodes: Nodes | None


def load_sources(root: Path) -> list[Source]:
    """Read and parse all files of the project that are measured, sorted by path.

    Raises:
        SourceError: If a file cannot be read or has a syntax error.
    """
    sources = []
    for path, package in sorted(_iter_paths(root)):
        name = path.relative_to(root).as_posix()
        try:
            sources.append(parse_source(name, package, path.read_text("utf-8")))
        except (OSError, UnicodeDecodeError, SyntaxError) as error:
            raise SourceError(f"{name}: cannot be read or parsed: {error}") from error
    return sources


def parse_source(path: str, package: str, text: str) -> Source:
    """Build a `Source` from the content of a file, and parse a Python file."""
    return Source(path, package, text, _collect_nodes(ast.parse(text)) if path.endswith(".py") else None)


def _iter_paths(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path and the package of each file."""
    for package in CODE:
        for path in (root / package).rglob("*.py"):
            yield path, package
    for path in (*(root / guide for guide in GUIDES), *(root / DOCS).glob("*.md")):
        if path.is_file() and path.name not in GENERATED_PAGES:
            yield path, DOCS


def _collect_nodes(module: ast.Module) -> Nodes:
    nodes = Nodes()
    pending: list[tuple[ast.AST, bool]] = [(module, False)]  # a node, and whether a function contains it
    while pending:
        node, in_function = pending.pop()
        if type(node) in _COLLECTED_TYPES:
            in_function = _collect_node(node, in_function, nodes)
        # `x += 1` changes the value of `x`, but does not bind a new name.
        children = [node.value] if isinstance(node, ast.AugAssign) else ast.iter_child_nodes(node)
        pending.extend((child, in_function) for child in children)
    return nodes


def _collect_node(node: ast.AST, in_function: bool, nodes: Nodes) -> bool:
    """Add a node to `nodes`.

    Args:
        node: A node of one of the types `_COLLECTED_TYPES`.
        in_function: Whether a function contains the node. Only then are names locals.
        nodes: Lists to add the node to.

    Returns:
        Whether a function contains the children of the node.
    """
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            nodes.functions.append(node)
            return True
        case ast.ClassDef():
            nodes.classes.append(node)
            return False
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp() | ast.Lambda():
            return True
        case ast.Call():
            nodes.calls.append(node)
        case ast.Expr(value=ast.Constant(value=str()) as string):
            nodes.strings.append(string)
        case ast.Name(ctx=ast.Store()) if in_function:
            nodes.locals.append((node.id, node.lineno))
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) if in_function:
            nodes.locals.append((name, node.lineno))
    return in_function


_COLLECTED_TYPES = {
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Call, ast.Expr),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.Name, ast.ExceptHandler, ast.MatchAs),
}


def get_last_name(expression: ast.expr) -> str:
    """Return the last part of a dotted name: `"Error"` for `errors.Error`, `errors.Error[int]` and `Error()`.

    Returns:
        The name, or an empty string if the expression contains no name.
    """
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return get_last_name(inner)
    return ""


def find_error_callables(sources: Sequence[Source]) -> frozenset[str]:
    """Find the names of callables whose string arguments are error messages.

    Returns:
        `require`, exception classes of Python and of the project, and functions of the project that return an
        exception or never return.
    """
    modules = [source.nodes for source in sources if source.nodes]
    classes = [node for nodes in modules for node in nodes.classes]
    errors = {name for name, value in vars(builtins).items() if _is_exception_class(value)}
    previous_count = 0
    while len(errors) > previous_count:  # Repeated, because the base class may be defined later.
        previous_count = len(errors)
        errors |= {node.name for node in classes if any(get_last_name(base) in errors for base in node.bases)}
    factories = {
        function.name
        for nodes in modules
        for function in nodes.functions
        if function.returns and _get_union_members(function.returns) & (errors | {"NoReturn"})
    }
    return frozenset({"require"} | errors | factories)


def _is_exception_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _get_union_members(annotation: ast.expr) -> set[str]:
    """Return the names of the members of a union such as `int | None`, or the name of another type."""
    if isinstance(annotation, ast.BinOp):
        return _get_union_members(annotation.left) | _get_union_members(annotation.right)
    return {get_last_name(annotation)}
