"""Command-line flags, derived from the schema: ``--train.steps 20`` for the key ``train.steps``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.errors import CheckpointError
from converters.storage.path_or_url import expanded
from portable.config import keys
from portable.config.suggest import did_you_mean, what_to_do
from portable.config.yaml_text import parse_mapping, parse_value
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

_NULL = ("null", "none", "~")


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
    """Values by the option's name, not validated yet."""
    overrides: list[Override] = field(default_factory=list)
    help: str | None = None
    """The topic of ``--help``: a section or key, empty for everything; None without ``--help``."""


def parse(argv: Sequence[str], model: type[BaseModel], options: type[BaseModel] | None = None) -> Parsed:
    """Parse ``argv`` into ``options`` and overrides of ``model``'s settings. Raises ``UserError``."""
    return _Parser(list(argv), model, keys.settings(options) if options else {}).run()


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
    def __init__(self, argv: list[str], model: type[BaseModel], options: dict[str, keys.Setting]) -> None:
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
            given = [inline] if equals else None
            if name == "help":
                self._parsed.help = inline if equals else self._topic()
            elif name in self._options:
                self._option(name, flag, given)
            else:
                self._setting(name, flag, given)
        return self._parsed

    def _option(self, name: str, flag: str, given: list[str] | None) -> None:
        setting, before = self._options[name], self._parsed.options
        words = self._words(1) if given is None else given
        value: Any = True
        if words or not setting.takes(bool):
            word = self._needed(words, flag, setting.metavar, text=False)[0]
            value = word if setting.is_text else parse_value(word)
        if setting.takes(tuple):
            value = [*before.get(name, ()), value]
        elif setting.may_be_path and before.get(name, value) != value:  # would be ignored silently
            raise UserError(f"{flag} is given twice, as {before[name]} and as {value}; remove one of the two")
        before[name] = value

    def _setting(self, name: str, flag: str, given: list[str] | None) -> None:
        value: Any = True
        if (setting := self._table.get(name)) is not None:
            words = self._words(None if setting.takes(tuple) else 1) if given is None else given
            if words or not setting.takes(bool):
                value = read(setting, self._needed(words, flag, setting.allowed, text=setting.is_text), flag)
        elif (setting := self._table.get(name.removeprefix("no_"))) is not None and setting.takes(bool):
            if given is not None:
                raise UserError(f"{flag} takes no value; use --{setting.key} {given[0]}")
            name, value = setting.key, False
        elif open_mapping(self._model, name):
            words = self._words(1) if given is None else given
            words = self._needed(words, flag, "anything that the mapping may hold", text=False)
            value = parse_mapping(words[0], flag)
        else:
            raise UserError(self._unknown(name, flag))
        self._parsed.overrides.append(Override(tuple(name.split(".")), value, flag))

    def _needed(self, words: list[str], flag: str, what: str, *, text: bool = True) -> list[str]:
        """``words``, which must be some; an empty variable of the shell is none, except for ``text``."""
        if not words or not (text or any(map(str.strip, words))):
            raise UserError(f"{flag} needs a value: {what}")
        return words

    def _words(self, most: int | None) -> list[str]:
        """At most ``most`` words up to the next flag; None: all."""
        ends = (number for number, word in enumerate(self._rest) if _is_flag(word))
        words = self._rest[: next(ends, len(self._rest))][:most]
        del self._rest[: len(words)]
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
        if token in ("train", "run"):
            return f"unexpected argument {token!r}; leave it out, as in portable-train --config run.yaml"
        return f"unexpected argument {token!r}; write settings as --train.steps 20; --help lists them"

    def _unknown(self, name: str, flag: str) -> str:
        if name in keys.sections(self._model):
            inside = [key for key in self._table if key.startswith(f"{name}.")]
            hint = what_to_do(name) or f"; set a key in it, such as --{inside[0]}; --help {name} lists them"
            return f"{flag} is a section{hint}"
        known = [*self._table, *(name.replace("_", "-") for name in self._options)]
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


def read(setting: keys.Setting, words: Sequence[str], flag: str) -> Any:
    """The value that ``words`` are for ``setting``: YAML, but text stays text. The schema validates it.

    Raises:
        UserError: for a mapping that is not valid.
    """
    first = words[0]
    if len(words) == 1:
        if first.lower() in _NULL and setting.takes(type(None)):
            return None
        if first.startswith("{") and setting.takes(dict):
            return parse_mapping(first, flag)
        if first.startswith("[") and setting.takes(tuple):
            return parse_value(first)
        if not setting.takes(tuple):
            return first if setting.is_text else parse_value(first)
        # If plain text is allowed, too, as for data.source, a comma may be part of a name.
        words = words if setting.takes(str) else first.split(",")
    return [word.strip() if setting.is_text else parse_value(word.strip()) for word in words]


def _is_flag(token: str) -> bool:
    return token.startswith("--") or token == "-h"
