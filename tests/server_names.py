"""Tensor names that vLLM and SGLang can load, read from their sources.

The servers cannot be imported without a GPU and hundreds of megabytes of dependencies. `Server` parses the
model files of their wheels instead. It follows a tensor name through the mappings of the model class and
through the attributes of the classes that the model consists of. The branches of a constructor are not
evaluated, so `Server` accepts the names of every branch.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import transformers

VARIABLE = "PORTABLE_OWNERS"
"""Environment variable that names the folder of `tests.owners`. The subfolder ``servers`` has the sources."""
NEEDS_SERVERS = f"needs {VARIABLE}=FOLDER after python -m tests.owners build FOLDER"
PACKAGES = {"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"}
MODELS = {"vllm": "vllm.model_executor.models", "sglang": "sglang.srt.models"}
SUFFIXES = frozenset({"weight", "bias"})
"""Parameters that the layers of a server create through their quantization method."""
PACKED = frozenset({"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"})
"""Tensors with all experts of a layer, as transformers 5 holds them in memory."""
PACKED_MODULES = "packed_modules_mapping"
"""Attribute of vLLM's classes with the modules that one module of the server combines."""
LINEAR_CLASSES = frozenset({"LinearBase", "VocabParallelEmbedding"})
"""Base classes of the layers of vLLM that LoRA can adapt."""
_TRANSFORMERS = "transformers.models."
MAX_REPLACEMENTS = 3
_BUILD_TEXT_MODEL = "init_vllm_registered_model"
"""Function of vLLM that builds the text model of a multimodal model."""
_CHOOSE_MODEL = "self._get_sgl_model_cls"
"""Method of SGLang that returns the class of the text model or of the vision model for a config."""
TEXT_MODEL = "LlamaForCausalLM"
"""Class used for a text model whose class only the config determines."""
VISION_MODEL = "PixtralVisionModel"
"""Class used for a vision model whose class only the config determines."""


def build(folder: Path) -> None:
    """Download the wheels without their dependencies, and extract their Python files.

    Args:
        folder: Folder to create, with one subfolder per server.
    """
    for package, requirement in PACKAGES.items():
        with tempfile.TemporaryDirectory() as scratch:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
            subprocess.run([*download, requirement], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith(f"{package}/")]
                archive.extractall(folder, [name for name in names if name.endswith(".py")])


class ModuleSource:
    """Parsed file of a server and the names that it defines."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.tree = ast.parse(path.read_text("utf-8"))
        self.definitions: dict[str, ast.AST] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(self.tree):  # Some constructors import the classes that they use.
            if isinstance(node, ast.ImportFrom):
                base = package.split(".")
                base = base[: len(base) - node.level + 1] if node.level else []
                source = ".".join([*base, *filter(None, [node.module])])
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (source, alias.name)
        for node in iterate_statements(self.tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.definitions[target.id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self.definitions[node.target.id] = node.value


def iterate_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and the statements in its `if` and `try` blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            blocks = [node.body, node.orelse, *(handler.body for handler in getattr(node, "handlers", ()))]
            for block in blocks:
                yield from iterate_statements(block)


@dataclasses.dataclass(eq=False)
class ServerClass:
    """Class of a server.

    Attributes:
        module: The file that defines the class.
        node: The definition.
        in_models: Whether the file is one of the server's models. Otherwise it contains layers.
    """

    module: ModuleSource
    node: ast.ClassDef
    in_models: bool


class Leaf(NamedTuple):
    """Module whose attributes are not followed: a layer of torch, or a factory of the server.

    Attributes:
        name: Name of the class or function.
        experts: Whether the module holds the experts of a layer.
    """

    name: str
    experts: bool


Child = ServerClass | Leaf


class Server:
    """Model classes of a server.

    Args:
        folder: Folder that `build` wrote.
        package: Key of `PACKAGES`.
    """

    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package
        self._modules: dict[str, ModuleSource | None] = {}
        self._attributes: dict[int, dict[str, list[Child]]] = {}
        self._classes: dict[tuple[str, str], ServerClass] = {}
        self._methods: dict[int, list[ast.FunctionDef]] = {}
        self._bases: dict[int, list[ServerClass]] = {}
        self._replacements: dict[int, list[tuple[str, str]]] = {}
        self._mappers: dict[int, Any] = {}
        self._resolved: dict[tuple[str, str], list[Child]] = {}
        self._expert_words: dict[int, tuple[set[str], bool]] = {}
        self._packed: dict[int, dict[str, list[str]]] = {}

    # -- files and classes -----------------------------------------------------------------------------

    def read_module(self, name: str) -> ModuleSource | None:
        """Parse a module of the server, or return None if the server does not have the module."""
        if name not in self._modules:
            is_transformers = name.startswith(_TRANSFORMERS)  # SGLang uses some of its projectors.
            root = Path(transformers.__file__).parents[1] if is_transformers else self.folder
            path = root / name.replace(".", "/")
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            belongs = (is_transformers or name.split(".")[0] == self.package) and path.is_file()
            self._modules[name] = ModuleSource(name, path) if belongs else None
        return self._modules[name]

    @cached_property
    def _entries(self) -> dict[str, tuple[str, str]]:
        """Module and class for each name in ``architectures``."""
        models = MODELS[self.package]
        if self.package == "vllm":
            registry = self.read_module(f"{models}.registry")
            assert registry is not None
            entries: dict[str, tuple[str, str]] = {}
            for table in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"):
                entries |= ast.literal_eval(registry.definitions[table])
            return {key: (f"{models}.{module}", name) for key, (module, name) in entries.items()}
        entries = {}
        for path in sorted((self.folder / models.replace(".", "/")).glob("*.py")):
            _, separator, classes = path.read_text("utf-8").rpartition("\nEntryClass = ")
            if separator:
                for name in re.findall(r"\w+", classes.split("]")[0]):
                    entries[name] = (f"{models}.{path.stem}", name)
        return entries

    def find_class(self, architecture: str) -> ServerClass | None:
        """Return the class for a name in ``architectures``, or None if the server has no own class for it."""
        module, name = self._entries.get(architecture, ("", ""))
        if not module or module.endswith(".transformers"):
            return None
        classes = self._resolve(self.read_module(module), name)
        return next((child for child in classes if isinstance(child, ServerClass)), None)

    def _resolve(
        self, module: ModuleSource | None, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> list[Child]:
        """Return the classes that a name of a module can refer to."""
        if module is None or (module.name, name) in seen:
            return []
        if not seen:
            if (module.name, name) not in self._resolved:
                start = frozenset({("", "")})
                self._resolved[module.name, name] = list(dict.fromkeys(self._resolve(module, name, start)))
            return self._resolved[module.name, name]
        seen |= {(module.name, name)}
        node = module.definitions.get(name)
        in_models = module.name.startswith(MODELS[self.package])
        if isinstance(node, ast.ClassDef):
            if not in_models and "moe" in name.lower():
                return [Leaf(name, experts=True)]
            key = (module.name, name)
            if key not in self._classes:
                self._classes[key] = ServerClass(module, node, in_models)
            return [self._classes[key]]
        if isinstance(node, ast.FunctionDef):
            if not in_models:
                return [Leaf(name, experts="moe" in name.lower())]
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        elif node is not None:
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        elif name in module.imports:
            source, original = module.imports[name]
            other = self.read_module(source)
            if other is None:
                return []
            return self._resolve(other, original, seen)
        else:
            return []
        return [child for each in sorted(names) for child in self._resolve(module, each, seen)]

    def list_bases(self, server_class: ServerClass) -> list[ServerClass]:
        """Return a class and the classes of the server that it inherits from."""
        if id(server_class) not in self._bases:
            classes = [server_class]
            for base in server_class.node.bases:
                if isinstance(base, ast.Name):
                    for child in self._resolve(server_class.module, base.id):
                        if isinstance(child, ServerClass):
                            classes += self.list_bases(child)
            self._bases[id(server_class)] = classes
        return self._bases[id(server_class)]

    # -- attributes ------------------------------------------------------------------------------------

    def list_attributes(self, server_class: ServerClass) -> dict[str, list[Child]]:
        """Return the attributes of a class that can hold a parameter or a module, with their classes."""
        if id(server_class) in self._attributes:
            return self._attributes[id(server_class)]
        attributes: dict[str, list[Child]] = {}
        arguments = self._read_base_arguments(server_class)
        for each in self.list_bases(server_class):
            for method in each.node.body:
                if isinstance(method, ast.FunctionDef):
                    if method.name == "__init__":
                        for name, children in self._read_passed_classes(method, arguments):
                            attributes.setdefault(name, []).extend(children)
                    for name, children in self._read_assignments(server_class, each.module, method):
                        attributes.setdefault(name, []).extend(children)
        attributes = {name: list(dict.fromkeys(children)) for name, children in attributes.items()}
        self._attributes[id(server_class)] = attributes
        return attributes

    def _read_base_arguments(self, server_class: ServerClass) -> dict[str, list[Child]]:
        """Return the classes that the constructors of a class pass to the constructors of its bases."""
        passed: dict[str, list[Child]] = {}
        classes = self.list_bases(server_class)
        for each in classes:
            defaults = read_defaults(each.node)
            for node in ast.walk(each.node):
                if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("__init__")):
                    continue
                for base in classes:
                    for method in base.node.body if base is not each else ():
                        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                            names = [argument.arg for argument in method.args.args[1:]]
                            for name, value in zip(names, node.args, strict=False):
                                passed.setdefault(name, []).extend(
                                    self._find_classes(each.module, value, defaults)
                                )
                for keyword in node.keywords:
                    if keyword.arg:
                        children = self._find_classes(each.module, keyword.value, defaults)
                        passed.setdefault(keyword.arg, []).extend(children)
        return {name: children for name, children in passed.items() if children}

    def _read_passed_classes(
        self, method: ast.FunctionDef, arguments: Mapping[str, list[Child]]
    ) -> Iterator[tuple[str, list[Child]]]:
        """Yield the attributes that a constructor creates from classes in its arguments."""
        aliases = {name: {name} for name in arguments}
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                for each in ast.walk(node.value):
                    if isinstance(each, ast.Name) and each.id in arguments:
                        aliases.setdefault(node.targets[0].id, set()).add(each.id)
        for node in ast.walk(method):
            if not isinstance(node, ast.Assign):
                continue
            names = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
            children = [
                child
                for name in sorted(names & aliases.keys())
                for argument in sorted(aliases[name])
                for child in arguments[argument]
            ]
            for target in node.targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self" and children:
                        yield each.attr, children

    def _read_assignments(
        self, server_class: ServerClass, module: ModuleSource, method: ast.FunctionDef
    ) -> Iterator[tuple[str, list[Child]]]:
        values = {name: [*defaults] for name, defaults in read_defaults(method).items()}
        assigned: list[tuple[ast.expr, ast.expr]] = []
        for node in ast.walk(method):
            if isinstance(node, ast.FunctionDef) and node is not method:
                inner = [each for each in ast.walk(node) if isinstance(each, ast.Name | ast.Subscript)]
                values.setdefault(node.name, []).extend(inner)
            if isinstance(node, ast.Assign):
                assigned += [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                assigned.append((node.target, node.value))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("register_parameter", "register_buffer", "add_module") and node.args:
                    if isinstance(node.args[0], ast.Constant):
                        yield str(node.args[0].value), self._find_classes(module, node, {})
                elif node.func.attr == "append" and isinstance(node.func.value, ast.Name):
                    values.setdefault(node.func.value.id, []).append(node.args[0])
        for target, value in assigned:
            if isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(value)
        for target, value in assigned:
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            for each in targets:
                if (
                    isinstance(each, ast.Attribute)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == "self"
                    and (isinstance(value, ast.Name) or any(isinstance(n, ast.Call) for n in ast.walk(value)))
                ):
                    children = self._find_classes(module, value, values)
                    nested = [item for node in ast.walk(value) for item in values.get(read_name(node), ())]
                    built = [self._find_built(server_class, item) for item in (value, *nested)]
                    yield each.attr, children + list(itertools.chain.from_iterable(built))
                elif (
                    isinstance(each, ast.Attribute)
                    and isinstance(each.value, ast.Attribute)
                    and "Parameter" in ast.dump(value)
                ):
                    yield each.value.attr, [Leaf(each.attr, experts=False)]

    def _find_built(self, server_class: ServerClass, value: ast.expr) -> list[Child]:
        """Return the classes in the methods and class attributes of ``self`` that an expression uses."""
        used = [
            node.func if isinstance(node, ast.Call) else node.value
            for node in ast.walk(value)
            if isinstance(node, ast.Call | ast.Subscript)
        ]
        called = {
            node.attr for node in used if isinstance(node, ast.Attribute) and read_name(node.value) == "self"
        }
        children: list[Child] = []
        body: ast.AST
        for each in self.list_bases(server_class) if called else ():
            for method in each.node.body:
                if isinstance(method, ast.FunctionDef):
                    defined, body = {method.name}, method
                elif isinstance(method, ast.AnnAssign) and method.value:
                    defined, body = {ast.unparse(method.target)}, method.value
                elif isinstance(method, ast.Assign):
                    defined, body = {ast.unparse(target) for target in method.targets}, method.value
                else:
                    continue
                if defined & called:
                    names = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
                    children += [
                        child for name in sorted(names) for child in self._resolve(each.module, name)
                    ]
        return children

    def _find_classes(
        self, module: ModuleSource, value: ast.expr, values: Mapping[str, list[ast.expr]], depth: int = 3
    ) -> list[Child]:
        """Return the classes that an expression mentions.

        Args:
            module: The file.
            value: The expression.
            values: Values of the local variables.
            depth: Number of local variables to follow.
        """
        children: list[Child] = []
        for node in ast.walk(value):
            if isinstance(node, ast.Name):
                if node.id in values:
                    if depth:
                        for each in values[node.id]:
                            children += self._find_classes(module, each, values, depth - 1)
                else:
                    children += self._resolve(module, node.id)
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in self._entries
            ):
                other = self.find_class(node.value)  # Another model, named by its architecture.
                children += [] if other is None else [other]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == _BUILD_TEXT_MODEL:
                if not any(
                    isinstance(each, ast.Constant) and each.value in self._entries for each in ast.walk(node)
                ):
                    text_model = self.find_class(TEXT_MODEL)
                    children += [] if text_model is None else [text_model]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == _CHOOSE_MODEL:
                chosen = self.find_class(VISION_MODEL if "vision" in ast.unparse(node) else TEXT_MODEL)
                children += [] if chosen is None else [chosen]
            elif (
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nn"
            ) and node.attr not in ("Module", "ModuleList", "ModuleDict", "Sequential"):
                children.append(Leaf(node.attr, experts=False))
        return children

    # -- loading ---------------------------------------------------------------------------------------

    def list_loaders(self, server_class: ServerClass) -> list[ast.FunctionDef]:
        """Return the methods and functions that load the weights of a class or rename them."""
        if id(server_class) not in self._methods:
            methods: list[ast.FunctionDef] = []
            for each in self.list_bases(server_class):
                for node in each.node.body:
                    if isinstance(node, ast.FunctionDef) and re.search("load|mapping|preprocess", node.name):
                        methods.append(node)
                        methods += self._list_called_loaders(each.module, node)
            self._methods[id(server_class)] = list(dict.fromkeys(methods))
        return self._methods[id(server_class)]

    def _list_called_loaders(self, module: ModuleSource, method: ast.FunctionDef) -> list[ast.FunctionDef]:
        """Return the methods of other classes, such as ``OtherModel.load_weights``, that a method calls."""
        methods = []
        for node in ast.walk(method):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            if node.attr == "load_weights":
                for child in self._resolve(module, node.value.id):
                    if isinstance(child, ServerClass):
                        methods += self.list_loaders(child)
        return methods

    def list_replacements(self, server_class: ServerClass) -> list[tuple[str, str]]:
        """Return the pairs (old, new) of strings that the loaders of a class replace in names."""
        if id(server_class) in self._replacements:
            return self._replacements[id(server_class)]
        pairs: dict[tuple[str, str], None] = {}
        for node in itertools.chain.from_iterable(map(ast.walk, self.list_loaders(server_class))):
            if isinstance(node, ast.Tuple) and len(node.elts) == 3:
                new, old = (get_string(item) for item in node.elts[:2])
                if new and old:
                    pairs[old, new] = None
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "replace" and len(node.args) >= 2:
                    old, new = (get_string(item) for item in node.args[:2])
                    if old and new is not None:
                        pairs[old, new] = None
            elif isinstance(node, ast.Dict):
                pairs |= dict.fromkeys(read_string_items(node))
        for each in self.list_bases(server_class):
            for item in each.node.body:
                if isinstance(item, ast.Assign) and isinstance(item.value, ast.Dict):
                    pairs |= dict.fromkeys(read_string_items(item.value))
        self._replacements[id(server_class)] = list(pairs)
        return self._replacements[id(server_class)]

    def get_mapper(self, server_class: ServerClass) -> Any:
        """Return the WeightsMapper of a class, or None."""
        if id(server_class) not in self._mappers:
            self._mappers[id(server_class)] = None
            for each in self.list_bases(server_class):
                for node in each.node.body:
                    target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
                    if isinstance(node, ast.Assign) and re.fullmatch(r"hf_to_\w+_mapper", target):
                        self._mappers[id(server_class)] = self._evaluate(each.module, node.value)
                        return self._mappers[id(server_class)]
        return self._mappers[id(server_class)]

    @cached_property
    def _mapper_class(self) -> Any:
        module = self.read_module(f"{MODELS[self.package]}.utils")
        assert module is not None
        namespace: dict[str, Any] = {
            "dataclass": dataclasses.dataclass,
            "field": dataclasses.field,
            "replace": dataclasses.replace,
            "re": re,
            "Mapping": Mapping,
            "Iterable": Iterable,
            "Any": Any,
        }
        node = module.definitions["WeightsMapper"]
        assert isinstance(node, ast.ClassDef)
        future = ast.parse("from __future__ import annotations").body
        code = ast.Module([*future, node], [])
        exec(compile(code, "WeightsMapper", "exec"), namespace)
        return namespace["WeightsMapper"]

    def _evaluate(self, module: ModuleSource, expression: ast.expr) -> Any:
        """Evaluate the expression of a mapper, with the server's own WeightsMapper."""
        server = self

        class ClassReference:
            def __init__(self, child: ServerClass) -> None:
                self.child = child

            def __getattr__(self, name: str) -> Any:
                if name == PACKED_MODULES:
                    return server.read_packed_modules(self.child)
                return server.get_mapper(self.child)

        class Namespace(dict[str, Any]):
            def __missing__(self, name: str) -> Any:
                for child in server._resolve(module, name):
                    if isinstance(child, ServerClass):
                        return ClassReference(child)
                definition = module.definitions.get(name)
                if isinstance(definition, ast.expr):
                    return server._evaluate(module, definition)
                raise NameError(name)

        namespace = Namespace(WeightsMapper=self._mapper_class, re=re)
        code = compile(ast.Expression(expression), module.name, "eval")
        return eval(code, {}, namespace)  # noqa: S307  (the source of a pinned package)

    # -- names -----------------------------------------------------------------------------------------

    def find_unknown(self, architecture: str, names: Iterable[str]) -> list[str]:
        """Return the names that the class of an architecture cannot load.

        Args:
            architecture: Name of the class in ``architectures``.
            names: Names of tensors in a checkpoint.

        Raises:
            KeyError: The server has no own class for the architecture.
        """
        server_class = self.find_class(architecture)
        if server_class is None:
            raise KeyError(architecture)
        return [name for name in names if not self._accepts(server_class, name, ())]

    def _accepts(self, child: Child, name: str, path: tuple[ServerClass, ...]) -> bool:
        if isinstance(child, Leaf):
            return self._is_expert(name, path) if child.experts else name in {*SUFFIXES, child.name}
        if child in path:
            return False
        path = (*path, child)
        attributes = self.list_attributes(child)
        for candidate in self._list_candidates(child, name):
            if candidate is None:  # The server skips the tensor on purpose.
                return True
            first, _, rest = candidate.partition(".")
            if first not in attributes:
                if not rest and first in SUFFIXES and self._is_layer(child):
                    return True
                continue
            while rest.partition(".")[0].isdigit() and not any(
                isinstance(each, Leaf) and each.experts for each in attributes[first]
            ):
                rest = rest.partition(".")[2]
            if not rest or any(self._accepts(each, rest, path) for each in attributes[first]):
                return True
        return False

    def _is_layer(self, server_class: ServerClass) -> bool:
        """Return whether a class is a layer or inherits from a layer of the server or of torch."""
        return any(
            not each.in_models
            or any(isinstance(base, ast.Attribute) and base.attr != "Module" for base in each.node.bases)
            for each in self.list_bases(server_class)
        )

    def _list_candidates(self, server_class: ServerClass, name: str) -> Iterator[str | None]:
        """Yield a name and the names that the loaders of a class can make of it."""
        mapper = self.get_mapper(server_class)
        names = [name]
        if mapper is not None:
            mapped = mapper._map_name(name)
            if mapped is None:
                yield None
                return
            names.insert(0, mapped)
        replacements = self.list_replacements(server_class)
        visited: set[str] = set()
        for _ in range(MAX_REPLACEMENTS + 1):
            following = []
            for candidate in names:
                if candidate not in visited:
                    visited.add(candidate)
                    yield candidate
                    following += [
                        candidate.replace(old, new) for old, new in replacements if old in candidate
                    ]
            names = following

    # -- adapters --------------------------------------------------------------------------------------

    def find_unused(self, architecture: str, names: Iterable[str]) -> list[str]:
        """Return the tensors of an adapter that vLLM does not load into a module of a class.

        vLLM's own functions parse the names. Its LoRA manager then looks up each module by its path, and
        ignores modules outside the language model by default.

        Args:
            architecture: Name of the class in ``architectures``.
            names: Names of tensors in ``adapter_model.safetensors``.

        Raises:
            KeyError: The server has no own class for the architecture.
        """
        server_class = self.find_class(architecture)
        if server_class is None:
            raise KeyError(architecture)
        return [name for name in names if not self._adapts(server_class, name)]

    def _adapts(self, server_class: ServerClass, name: str) -> bool:
        mapper = self.get_mapper(server_class)
        try:
            module, _ = self._parse_lora_name(name, mapper and mapper.get_rename_mapper())
        except ValueError:
            return False
        prefix = self._read_language_prefix(server_class)
        if prefix and not module.startswith(f"{prefix}."):
            return False
        if module.endswith(".experts.base_layer"):  # The other of two adapters of one module
            module = module.removesuffix(".base_layer")
        parent, _, last = module.rpartition(".")
        packed = self.read_packed_modules(server_class)
        modules = [key for key, children in packed.items() if last in children] or [last]
        return any(self._is_adaptable(server_class, f"{parent}.{each}".lstrip("."), ()) for each in modules)

    def _is_adaptable(self, child: Child, name: str, path: tuple[ServerClass, ...]) -> bool:
        """Return whether a path of attributes leads from a module to a layer that LoRA can adapt."""
        if isinstance(child, Leaf):
            return not name and child.experts
        if not name:
            return any(each.node.name in LINEAR_CLASSES for each in self.list_bases(child))
        if child in path:
            return False
        first, _, rest = name.partition(".")
        if rest.partition(".")[0].isdigit():
            rest = rest.partition(".")[2]
        children = self.list_attributes(child).get(first, ())
        return any(self._is_adaptable(each, rest, (*path, child)) for each in children)

    @cached_property
    def _parse_lora_name(self) -> Any:
        module = self.read_module("vllm.lora.utils")
        assert module is not None
        namespace: dict[str, Any] = {}
        body = [
            *ast.parse("from __future__ import annotations").body,
            module.definitions["parse_fine_tuned_lora_name"],
        ]
        exec(compile(ast.Module(body, []), "vllm.lora.utils", "exec"), namespace)  # type: ignore[arg-type]
        return namespace["parse_fine_tuned_lora_name"]

    def _read_language_prefix(self, server_class: ServerClass) -> str:
        """Return the path of the language model in a multimodal class, or an empty string."""
        for each in self.list_bases(server_class):
            for method in each.node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "get_mm_mapping":
                    for node in ast.walk(method):
                        if isinstance(node, ast.keyword) and node.arg == "language_model":
                            return (get_string(node.value) or "").rstrip(".")
        return ""

    def read_packed_modules(self, server_class: ServerClass) -> dict[str, list[str]]:
        """Return the modules that each combined module of a class consists of."""
        if id(server_class) not in self._packed:
            packed: dict[str, list[str]] = {}
            for each in reversed(self.list_bases(server_class)):
                for node in ast.walk(each.node):
                    if isinstance(node, ast.Assign):
                        target, value = node.targets[0], node.value
                    elif isinstance(node, ast.AnnAssign) and node.value is not None:
                        target, value = node.target, node.value
                    else:
                        continue
                    if isinstance(target, ast.Name) and target.id == PACKED_MODULES:
                        packed |= self._evaluate(each.module, value)
                    elif isinstance(target, ast.Subscript) and PACKED_MODULES in ast.unparse(target.value):
                        packed[ast.literal_eval(target.slice)] = ast.literal_eval(value)
            self._packed[id(server_class)] = packed
        return self._packed[id(server_class)]

    def is_stacked(self, server_class: ServerClass) -> bool:
        """Return whether vLLM's LoRA layers of a class take the experts of a layer in one tensor."""
        for each in self.list_bases(server_class):
            for node in each.node.body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "is_3d_moe_weight":
                    return node.value is not None and ast.unparse(node.value) == "True"
        return False

    # -- experts ---------------------------------------------------------------------------------------

    def _is_expert(self, name: str, path: tuple[ServerClass, ...]) -> bool:
        """Return whether the experts of a layer have a parameter, under its name in the checkpoint."""
        words: set[str] = set()
        has_own_loader = False
        for each in path:
            if id(each) not in self._expert_words:
                self._expert_words[id(each)] = self._read_expert_words(each)
            words |= self._expert_words[id(each)][0]
            has_own_loader |= self._expert_words[id(each)][1]
        if self.package == "vllm":
            words = words | {"gate_proj", "up_proj", "down_proj"}  # The defaults of its factory.
        parts = name.split(".")
        if len(parts) == 3 and parts[0].isdigit():
            return parts[1] in words and parts[2] in SUFFIXES
        if name in PACKED:
            return name in words or (self.package == "vllm" and not has_own_loader)
        return bool(re.fullmatch(r"w(13|2)_(weight|bias|weight_bias)", name))

    def _read_expert_words(self, server_class: ServerClass) -> tuple[set[str], bool]:
        """Read the names of experts' parameters, and whether the class looks up its parameters itself."""
        words = {
            item.value
            for base in self.list_bases(server_class)
            for node in ast.walk(base.node)
            if isinstance(node, ast.keyword) and node.arg and node.arg.startswith("ckpt_")
            for item in ast.walk(node.value)
            if isinstance(item, ast.Constant) and isinstance(item.value, str)
        }
        words |= {
            match[1]
            for base in self.list_bases(server_class)
            for node in ast.walk(base.node)
            if (match := re.search(r"experts\.(gate_up_proj|down_proj)$", get_string(node) or ""))
        }
        loaders = self.list_loaders(server_class)
        return words, any("params_dict" in ast.dump(method) for method in loaders)


def read_defaults(node: ast.AST) -> dict[str, list[ast.expr]]:
    """Return the default values of the arguments of a function, or of a class's constructor."""
    values: dict[str, list[ast.expr]] = {}
    methods = node.body if isinstance(node, ast.ClassDef) else [node]
    for method in methods:
        if not isinstance(method, ast.FunctionDef) or (method is not node and method.name != "__init__"):
            continue
        arguments = [*method.args.posonlyargs, *method.args.args]
        defaults = method.args.defaults
        for argument, default in zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True):
            values.setdefault(argument.arg, []).append(default)
        for argument, value in zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True):
            if value is not None:
                values.setdefault(argument.arg, []).append(value)
    return values


def read_name(node: ast.AST) -> str:
    """Return the name that a node consists of, or an empty string."""
    return node.id if isinstance(node, ast.Name) else ""


def get_string(node: ast.AST) -> str | None:
    """Return the value of a constant string, or None."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def read_string_items(node: ast.Dict) -> list[tuple[str, str]]:
    """Return the items of a dict display whose keys and values are strings."""
    items = [
        (get_string(key), get_string(value)) for key, value in zip(node.keys, node.values, strict=True) if key
    ]
    return [(key, value) for key, value in items if key and value is not None]
