"""Command-line flags, derived from the schema: ``--train.steps 20`` for the key ``train.steps``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from converters.errors import CheckpointError
from converters.storage.path_or_url import expanded
from portable.config import keys
from portable.config.suggest import did_you_mean, what_to_do
from portable.config.types import truth
from portable.config.yaml_text import parse_value
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import BaseModel

_NULL = ("null", "none", "~")


@dataclass(frozen=True)
class Option:
    """A flag of a command that is not a setting of the run."""

    name: str
    """As in ``--dry-run``, without the leading dashes."""
    kind: Literal["text", "count", "switch", "path", "paths"]
    """paths: may be repeated; the value is a list."""
    help: str
    metavar: str = ""

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Override:
    """A setting given outside the file."""

    path: tuple[str, ...]
    value: Any
    flag: str | None
    """The flag as typed; None from Python."""


@dataclass
class Parsed:
    """A parsed command line."""

    options: dict[str, Any] = field(default_factory=dict)
    overrides: list[Override] = field(default_factory=list)
    help: str | None = None
    """The topic of ``--help``: a section or key, empty for everything; None without ``--help``."""


def parse(argv: Sequence[str], model: type[BaseModel], options: Sequence[Option]) -> Parsed:
    """Parse ``argv`` into ``options`` and overrides of ``model``'s settings. Raises ``UserError``."""
    return _Parser(list(argv), model, {option.attribute: option for option in options}).run()


def open_mapping(model: type[BaseModel], key: str) -> keys.Setting | None:
    """The setting with an open mapping that contains ``key``, such as model.config.hidden_size."""
    table = keys.settings(model)
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        setting = table.get(".".join(parts[:length]))
        if setting is not None:
            return setting if setting.takes(dict) else None
    return None


class _Parser:
    def __init__(self, argv: list[str], model: type[BaseModel], options: dict[str, Option]) -> None:
        self._rest = argv
        self._model = model
        self._table = keys.settings(model)
        self._options = options
        self._parsed = Parsed()

    def run(self) -> Parsed:
        while self._rest:
            token = self._rest.pop(0)
            if token == "-h":
                token = "--help"
            if not token.startswith("--") or token == "--":
                raise UserError(self._stray(token))
            flag, equals, inline = token.partition("=")
            name = flag[2:].replace("-", "_")
            value = inline if equals else None
            if name == "help":
                self._parsed.help = self._topic() if value is None else value
            elif name in self._options:
                self._option(self._options[name], flag, value)
            else:
                self._setting(name, flag, value)
        return self._parsed

    def _option(self, option: Option, flag: str, inline: str | None) -> None:
        value: Any
        if option.kind == "switch":
            value = self._truth(flag, inline)
        else:
            value = self._one(flag, inline, option.metavar)
            if option.kind == "count":
                if not (value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= 10**8):
                    raise UserError(f"{flag} must be integer >= 1, got {value!r}")
                value = int(value)
            elif option.kind in ("path", "paths"):
                value = path_given(flag, value)
        if option.kind == "paths":
            value = [*self._parsed.options.get(option.attribute, ()), value]
        elif option.kind == "path" and self._parsed.options.get(option.attribute, value) != value:
            first = self._parsed.options[option.attribute]  # would be ignored silently
            raise UserError(f"{flag} is given twice, as {first} and as {value}; remove one of the two")
        self._parsed.options[option.attribute] = value

    def _setting(self, name: str, flag: str, inline: str | None) -> None:
        value: Any
        if name in self._table:
            value = self._value(self._table[name], flag, inline)
        elif name.startswith("no_") and name[3:] in self._table and self._table[name[3:]].takes(bool):
            if inline is not None:
                raise UserError(f"{flag} takes no value; use --{name[3:]} {inline}")
            name, value = name[3:], False
        elif open_mapping(self._model, name):
            value = parse_value(self._one(flag, inline, "anything that the mapping may hold"))
        else:
            raise UserError(self._unknown(name, flag))
        self._parsed.overrides.append(Override(tuple(name.split(".")), value, flag))

    def _value(self, setting: keys.Setting, flag: str, inline: str | None) -> Any:
        if setting.takes(bool):
            more: dict[str, Any] = {word: word for word in setting.choices}
            more |= dict.fromkeys(_NULL) if setting.takes(type(None)) else {}
            return self._truth(flag, inline, more, setting.allowed)
        if not setting.takes(tuple):
            return read(setting, self._one(flag, inline, setting.allowed))
        words = [inline] if inline is not None else self._words()
        if not words:
            raise UserError(f"{flag} needs a value: {setting.allowed}")
        return read(setting, words[0]) if len(words) == 1 else [read_item(setting, word) for word in words]

    def _truth(
        self,
        flag: str,
        inline: str | None,
        words: Mapping[str, Any] | None = None,
        allowed: str = "true | false",
    ) -> Any:
        """A boolean, or what one of ``words`` stands for. A flag without a value is true."""
        if inline is None:
            if not self._rest or _is_flag(self._rest[0]):
                return True
            inline = self._rest.pop(0)
        if (words or {}).keys() & {inline.lower()}:
            return (words or {})[inline.lower()]
        if not isinstance(value := truth(inline), bool):
            raise UserError(f"{flag} must be {allowed}, got {inline!r}")
        return value

    def _one(self, flag: str, inline: str | None, what: str) -> str:
        if inline is not None:
            return inline
        if not self._rest or _is_flag(self._rest[0]):
            raise UserError(f"{flag} needs a value: {what}")
        return self._rest.pop(0)

    def _words(self) -> list[str]:
        """The words up to the next flag."""
        words: list[str] = []
        while self._rest and not _is_flag(self._rest[0]):
            words.append(self._rest.pop(0))
        return words

    def _topic(self) -> str:
        """The topic of ``--help``: the next word, or the next flag if it is a setting."""
        if not self._rest:
            return ""
        name = self._rest[0].lstrip("-").replace("-", "_")
        known = name in self._table or name in keys.sections(self._model)
        return self._rest.pop(0) if known or not _is_flag(self._rest[0]) else ""

    def _stray(self, token: str) -> str:
        if token.endswith((".yaml", ".yml")):
            return f"unexpected argument {token!r}; use --config for a config file"
        if token.startswith("-") and token != "--":
            return f"unknown flag {token}; flags have two dashes, such as --train.steps; --help lists them"
        return f"unexpected argument {token!r}; write settings as --train.steps 20; --help lists them"

    def _unknown(self, name: str, flag: str) -> str:
        if name in keys.sections(self._model):
            inside = [key for key in self._table if key.startswith(f"{name}.")]
            hint = what_to_do(name) or f"; set a key in it, such as --{inside[0]}; --help {name} lists them"
            return f"{flag} is a section{hint}"
        known = [*self._table, *(option.name for option in self._options.values())]
        hint = did_you_mean(name, known, "--") or "; --help lists them"
        return f"unknown flag {flag if flag.isprintable() else repr(flag)}{hint}"


def path_given(flag: str, text: str) -> str:
    """Resolve ``~`` and ``${VAR}`` in ``text``. The shell does not expand them in ``--flag=~/x``.

    Raises:
        UserError: for an unknown environment variable or user.
    """
    try:
        return expanded(text)
    except CheckpointError as error:
        raise UserError(f"{flag} {error}") from error


def read(setting: keys.Setting, text: str) -> Any:
    """Parse a flag's ``text`` for ``setting``. The schema validates the result."""
    if text.lower() in _NULL and setting.takes(type(None)):
        return None
    if text.startswith("{") and setting.takes(dict):
        return parse_value(text)
    if setting.takes(tuple):
        if text.startswith("["):
            return parse_value(text)
        # If plain text is allowed, too, as for data.source, a comma may be part of a name.
        words = [text] if setting.takes(str) else text.split(",")
        return [read_item(setting, word) for word in words]
    return text if _is_textual(setting) else parse_value(text)


def read_item(setting: keys.Setting, text: str) -> Any:
    """Parse ``text`` as an item of a list."""
    return parse_value(text.strip()) if "number" in setting.allowed else text.strip()


def _is_textual(setting: keys.Setting) -> bool:
    """Whether the setting is text or a choice of words, so that 123 or null is text."""
    return not any(setting.takes(kind) for kind in (int, float, bool)) and "true" not in setting.allowed


def _is_flag(token: str) -> bool:
    return token.startswith("--") or token == "-h"
