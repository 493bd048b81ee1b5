"""Parse command-line flags, which are derived from the schema: ``--seed 1`` sets the setting ``seed``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portable.config import keys
from portable.config.origins import Assignment, Origin
from portable.config.suggestions import format_key_hint, format_remedy_hint
from portable.config.yaml_text import parse_mapping_or_text, parse_yaml_value
from portable.converters.errors import CheckpointError
from portable.converters.storage.path_or_url import expand_user_and_variables
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

_NULL_WORDS = ("null", "none", "~")
_FIRST_FLAG_ORDER = sys.maxsize // 2
"""Value of ``Origin.order`` for the first flag.

It is larger than the order of any line in a file, because flags override files.
"""


@dataclass
class ParsedCommandLine:
    """Options and settings on a command line, not validated yet.

    Attributes:
        options: Values of the command's options, keyed by name.
        settings: Settings of the run, in the order of their flags.
        help: Topic of ``--help``: a section or key, or empty for an overview. None if ``--help`` is not
            given.
    """

    options: dict[str, Any] = field(default_factory=dict)
    settings: list[Assignment] = field(default_factory=list)
    help: str | None = None

    def add_setting(self, key: str, value: Any, flag: str) -> None:
        """Append a setting, as if its flag were the last on the command line.

        Args:
            key: Dotted key of the setting.
            value: Value of the setting, not validated yet.
            flag: The flag as the user typed it.
        """
        origin = Origin(flag, _FIRST_FLAG_ORDER + len(self.settings), is_flag=True)
        self.settings.append(Assignment(tuple(key.split(".")), value, origin))


def parse_flags(
    argv: Sequence[str], model: type[BaseModel], options: type[BaseModel] | None = None
) -> ParsedCommandLine:
    """Parse a command line.

    Args:
        argv: Command-line arguments. They are not changed.
        model: Schema of the config. Every setting has a flag.
        options: Schema of the command's options, such as ``--dry-run``. None if it has no options.

    Raises:
        UserError: If an argument is not a flag, if a flag is unknown, or if its value is missing or
            invalid.
    """
    return _FlagParser(list(argv), model, keys.get_setting_fields(options) if options else {}).parse()


def parse_setting_words(setting: keys.SettingField, words: Sequence[str], flag: str) -> Any:
    """Parse the arguments after a flag as YAML.

    The value of a text setting is not parsed: ``--data.source 123`` gives the string ``123``.
    However, if the setting accepts null, a mapping or a list, these values are recognized by the
    words ``null``, ``none`` and ``~``, or by the opening brace or bracket. For a list, a single
    argument is split at commas, unless the setting also accepts a single string.

    Args:
        setting: The setting of the flag.
        words: One argument, or several for a list.
        flag: The flag as the user typed it, used in error messages.

    Returns:
        The value, not validated yet.

    Raises:
        UserError: If the arguments begin with a brace and are not a valid mapping.
    """
    first_word = words[0]
    if len(words) == 1:
        if first_word.lower() in _NULL_WORDS and setting.accepts_type(type(None)):
            return None
        if first_word.startswith("{") and setting.accepts_type(dict):
            return parse_mapping_or_text(first_word, flag)
        if first_word.startswith("[") and setting.accepts_type(tuple):
            return parse_yaml_value(first_word)
        if not setting.accepts_type(tuple):
            return first_word if setting.is_text else parse_yaml_value(first_word)
        # A comma separates items, unless the setting also accepts a single string, in which a comma may be
        # part of a name.
        words = words if setting.accepts_type(str) else first_word.split(",")
    return [word.strip() if setting.is_text else parse_yaml_value(word.strip()) for word in words]


def expand_path(flag: str, path: str) -> str:
    """Expand ``~`` and ``${VAR}`` in a path that the shell has not expanded, such as ``--flag=~/x``.

    Args:
        flag: The flag as the user typed it, used in error messages.
        path: Value of the flag.

    Raises:
        UserError: If an environment variable or a user is unknown.
    """
    try:
        return expand_user_and_variables(path)
    except CheckpointError as error:
        raise UserError(f"{flag}: {error}") from error


class _FlagParser:
    """Parser for a single command line. Removes each argument from ``argv`` once it is parsed."""

    def __init__(
        self, argv: list[str], model: type[BaseModel], options: dict[str, keys.SettingField]
    ) -> None:
        """Prepare to parse a command line.

        Args:
            argv: Command-line arguments. :meth:`parse` removes them from this list until it is
                empty.
            model: Schema of the config. Every setting has a flag.
            options: Options of the command, such as ``--dry-run``, keyed by name with underscores.
        """
        self._remaining_words = argv
        self._schema = model
        self._setting_fields = keys.get_setting_fields(model)
        self._option_fields = options
        self._result = ParsedCommandLine()

    def parse(self) -> ParsedCommandLine:
        """Parse all arguments, and return the options and settings. Must be called only once.

        Raises:
            UserError: If an argument is not a flag, if a flag is unknown, or if its value is missing or
                invalid.
        """
        while self._remaining_words:
            token = self._remaining_words.pop(0)
            if token == "-h":
                token = "--help"
            if not token.startswith("--") or token == "--":
                raise UserError(_describe_stray_word(token))
            flag, equals, inline_value = token.partition("=")
            name = flag[2:].replace("-", "_")
            value = [inline_value] if equals else None
            if name == "help":
                self._result.help = inline_value if equals else self._pop_help_topic()
            elif name in self._option_fields:
                self._parse_option(name, flag, value)
            else:
                self._parse_setting(name, flag, value)
        return self._result

    def _parse_option(self, name: str, flag: str, inline_words: list[str] | None) -> None:
        """Parse an option of the command, and store its value. A repeatable option appends to its list.

        Args:
            name: Name of the option, with underscores.
            flag: The flag as the user typed it.
            inline_words: The value after an equals sign, as a list. None if the value is in the next
                arguments.

        Raises:
            UserError: If the value is missing, or if a path option is given twice with different values.
        """
        setting, earlier_options = self._option_fields[name], self._result.options
        words = self._pop_value_words(1) if inline_words is None else inline_words
        value: Any = True
        if words or not setting.accepts_type(bool):
            _check_has_value(words, flag, setting.value_placeholder, may_be_empty=False)
            value = words[0] if setting.is_text else parse_yaml_value(words[0])
        if setting.accepts_type(tuple):
            value = [*earlier_options.get(name, ()), value]
        elif setting.may_be_path and earlier_options.get(name, value) != value:
            # Otherwise the first value would be ignored without a message.
            raise UserError(
                f"{flag}: is specified twice, as {earlier_options[name]} and as {value}; remove one of the "
                "two"
            )
        earlier_options[name] = value

    def _parse_setting(self, name: str, flag: str, inline_words: list[str] | None) -> None:
        """Parse a setting of the run, and store its value.

        Args:
            name: Dotted key from the flag, with underscores instead of dashes, such as
                ``train.learning_rate``. It may also be a key in a mapping, such as
                ``model.config.hidden_size``. A boolean without a value is set to true, and the
                prefix ``no_`` sets a boolean to false.
            flag: The flag as the user typed it.
            inline_words: Text after the equals sign, as a list with one string. None if the flag
                has no equals sign. The value is then read from the arguments after the flag.

        Raises:
            UserError: If the setting is unknown, or if its value is missing or invalid.
        """
        value: Any = True
        if (setting := self._setting_fields.get(name)) is not None:
            words = (
                self._pop_value_words(None if setting.accepts_type(tuple) else 1)
                if inline_words is None
                else inline_words
            )
            if words or not setting.accepts_type(bool):
                _check_has_value(words, flag, setting.allowed_values, may_be_empty=setting.is_text)
                value = parse_setting_words(setting, words, flag)
        elif (
            setting := self._setting_fields.get(name.removeprefix("no_"))
        ) is not None and setting.accepts_type(bool):
            if inline_words is not None:
                raise UserError(f"{flag}: takes no value; use --{setting.key} true or --{setting.key} false")
            name, value = setting.key, False
        elif keys.find_open_mapping(self._schema, name):
            words = self._pop_value_words(1) if inline_words is None else inline_words
            _check_has_value(words, flag, "a number, string, list or mapping", may_be_empty=False)
            value = parse_mapping_or_text(words[0], flag)
        else:
            raise UserError(self._describe_unknown_flag(name, flag))
        self._result.add_setting(name, value, flag)

    def _pop_value_words(self, max_words: int | None) -> list[str]:
        """Remove and return the arguments up to the next flag.

        Args:
            max_words: Maximum number of arguments to remove. None removes all arguments up to the next
                flag.
        """
        flag_indices = (number for number, word in enumerate(self._remaining_words) if _is_flag(word))
        words = self._remaining_words[: next(flag_indices, len(self._remaining_words))][:max_words]
        del self._remaining_words[: len(words)]
        return words

    def _pop_help_topic(self) -> str:
        """Remove and return the topic of ``--help``.

        The topic is the next word, or the next flag if it names a setting or a section, as in
        ``--help --train.steps``. Returns an empty string if there is no topic.
        """
        if not self._remaining_words:
            return ""
        name = self._remaining_words[0].lstrip("-").replace("-", "_")
        is_topic = name in self._setting_fields or name in keys.get_section_descriptions(self._schema)
        return self._remaining_words.pop(0) if is_topic or not _is_flag(self._remaining_words[0]) else ""

    def _describe_unknown_flag(self, name: str, flag: str) -> str:
        """Return the error message for a flag that is not a setting, with a suggestion.

        Args:
            name: Name of the flag, with underscores and without leading dashes. It may also be the
                name of a config section, such as ``train``.
            flag: The flag as the user typed it.
        """
        if name in keys.get_section_descriptions(self._schema):
            keys_in_section = [key for key in self._setting_fields if key.startswith(f"{name}.")]
            hint = format_remedy_hint(name) or (
                f"; set a key in this section, such as --{keys_in_section[0]}, or list its keys with "
                f"--help {name}"
            )
            return f"{flag}: is a section{hint}"
        flags = [*self._setting_fields, *(option.replace("_", "-") for option in self._option_fields)]
        hint = format_key_hint(name, flags, "--") or "; run --help to list the flags"
        return f"unknown flag {flag if flag.isprintable() else repr(flag)}{hint}"


def _check_has_value(words: list[str], flag: str, allowed_values: str, *, may_be_empty: bool) -> None:
    """Check that a flag has a value. Raises ``UserError`` if it does not.

    Args:
        words: The arguments after the flag.
        flag: The flag as the user typed it.
        allowed_values: Description of the allowed values.
        may_be_empty: Whether an empty string is a valid value. If not, it is an error, because a shell
            variable may be empty by mistake.
    """
    if not words or not (may_be_empty or any(map(str.strip, words))):
        raise UserError(f"{flag}: needs a value; specify {allowed_values}")


def _describe_stray_word(token: str) -> str:
    """Return the error message for an argument that is neither a flag nor the value of a flag."""
    if token.endswith((".yaml", ".yml")):
        return f"unexpected argument {token!r}; use --config for a config file"
    if token.startswith("-") and token != "--":
        return (
            f"unknown flag {token}; write a flag with two dashes, such as --train.steps, or run --help to "
            "list all flags"
        )
    if token in ("train", "run"):
        return f"unexpected argument {token!r}; leave out {token!r}, as in portable-train --config run.yaml"
    return (
        f"unexpected argument {token!r}; write settings as flags, such as --train.steps 20, or run --help to "
        "list all flags"
    )


def _is_flag(token: str) -> bool:
    """Return whether an argument is ``-h`` or begins with two dashes.

    All other arguments are values, such as negative numbers.
    """
    return token.startswith("--") or token == "-h"
