"""Define the exceptions of the converters, and make untrusted text safe to print."""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


# Maximum number of characters to print, because a name in an untrusted file may have any length.
_MAX_SHOWN = 2000


def to_printable(text: object) -> str:
    """Convert a value to one line without control characters.

    Names in files are untrusted, so error messages pass them through this function.

    Args:
        text: String, or an object such as a path, which is formatted with `str`.

    Returns:
        The line. Truncated if it is very long.
    """
    line = " ".join(str(text).split())
    if len(line) > _MAX_SHOWN:
        line = f"{line[:_MAX_SHOWN]}... ({len(line):,} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class CheckpointError(Exception):
    """Error raised for a checkpoint that is damaged, incomplete or unsupported.

    The message is one line. It names the file or key and, if there is one, the remedy.

    Attributes:
        exit_code: Exit code of a command that fails with this error.
    """

    exit_code: int = 65

    @property
    def reason(self) -> str:
        """Message without the remedy that the class adds."""
        return str(self.args[0])


class DamagedCheckpointError(CheckpointError):
    """Error raised for a checkpoint with wrong, truncated or missing content.

    The constructor accepts only the reason. The class appends a remedy to the message.
    """

    def __str__(self) -> str:
        return f"{self.reason}; copy the checkpoint again"


class MixedCheckpointError(CheckpointError):
    """Error raised for files that contradict each other.

    The constructor accepts only the reason. The class appends the probable cause and a remedy to the
    message.
    """

    def __str__(self) -> str:
        return (
            f"{self.reason}, because the files are damaged or from different runs or steps; copy the "
            "checkpoint again"
        )


class UnsupportedCheckpointError(CheckpointError):
    """Error raised for an intact checkpoint that uses an unsupported feature.

    The constructor accepts only the reason. The class appends a remedy to the message.
    """

    def __str__(self) -> str:
        return f"{self.reason}; export the model to safetensors with the program that wrote the checkpoint"


class UnsupportedQuantizationError(CheckpointError):
    """Error raised for quantized weights whose settings or layout are not supported.

    The constructor accepts only the reason. The class appends a remedy to the message.
    """

    def __str__(self) -> str:
        return f"{self.reason}; dequantize the checkpoint with the program that wrote it"


class UnconvertibleNamesError(CheckpointError):
    """Error raised if tensor names cannot be converted between published files and in-memory models.

    The constructor accepts only the reason. The class appends a remedy to the message.
    """

    def __str__(self) -> str:
        return f"{self.reason}; use the --names option that keeps the names of the source"


class CommandError(CheckpointError):
    """Error that the user can correct by changing an option or a path (SRC, OUT) of the command."""

    exit_code = 2


class OptimizerStateError(CheckpointError):
    """Error raised if the optimizer state cannot be read, although the weights can.

    Pass only the reason to the constructor. The message consists of the reason and the remedy
    `convert without --optimizer`. If the reason already ends with a remedy after a semicolon, the
    second remedy is added with "or".
    """

    def __str__(self) -> str:
        separator = ", or " if "; " in self.reason else "; "
        return f"{self.reason}{separator}convert without --optimizer"


_OS_REMEDIES = {
    errno.EACCES: "check the permissions",
    errno.EDQUOT: "free some space on the disk",
    errno.EEXIST: "choose another name",
    errno.EFBIG: "check the size of the file",
    errno.EINVAL: "check the type of the file",
    errno.EISDIR: "name a file instead of a folder",
    errno.ELOOP: "name the file itself instead of a link",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "check the path",
    errno.ENOSPC: "free some space on the disk",
    errno.ENOTDIR: "check the path",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a folder on another disk",
}
"""Remedy for each error number (`errno`) of the operating system."""


def explain_os_error(error: OSError) -> tuple[str, str]:
    """Return the reason for an `OSError`, and a remedy.

    Args:
        error: Error raised when a file or folder was accessed.

    Returns:
        The reason and the remedy, both without the path of the file or folder. If the error message
        ends with a semicolon and a remedy, that remedy is returned.
    """
    reason, _, remedy = to_printable(error.strerror or error).partition("; ")
    return reason, remedy or _OS_REMEDIES.get(error.errno or 0, "check the disk, and run the command again")


def format_os_error(error: OSError) -> str:
    """Format an `OSError` as `reason; remedy`. See `explain_os_error`."""
    return "; ".join(explain_os_error(error))


@contextmanager
def convert_os_errors() -> Iterator[None]:
    """Convert each `OSError` about a file or folder to a `CheckpointError` with its path.

    An `OSError` without a path, for example about standard output, propagates.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise CheckpointError(f"{os.fsdecode(error.filename)}: {format_os_error(error)}") from error


@contextmanager
def prefix_checkpoint_errors(prefix: object) -> Iterator[None]:
    """Prepend a path or option to the message of each `CheckpointError` raised in this context.

    A new exception of the same type replaces the original, so the type must accept the message as
    its only argument.

    Args:
        prefix: Path or option that caused the error.
    """
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{prefix}: {error.args[0]}") from None


def raise_unless_panic(error: BaseException) -> None:
    """Reraise an exception such as `KeyboardInterrupt`, which the caller should not handle.

    If the exception is an `Exception` or a panic of a Rust library, the function returns, so that
    the caller can handle it. Panics are usually caused by invalid input. PyO3 raises them as a
    direct subclass of `BaseException`, so `except Exception` does not catch them.

    Args:
        error: Exception that was caught.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


_URL_USERINFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^\s/@]*@", re.IGNORECASE)
_URL_QUERY = re.compile(r"(?P<url>[a-z][a-z0-9+.-]*://[^\s?'\"<>]*)\?[^\s'\"<>]*", re.IGNORECASE)
_KNOWN_TOKENS = re.compile(
    r"\b(?:"
    r"(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}"  # AWS
    r"|hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-(?=[\w-]*[A-Z0-9])[\w-]{8,}"  # OpenAI, Anthropic
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|xox[abeoprs]-[\w-]{10,}"  # Slack
    r"|AIza[\w-]{35}|ya29\.[\w-]{16,}"  # Google
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dop_v1_[a-f0-9]{40,}|r8_[A-Za-z0-9]{30,}|nvapi-[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"  # JSON Web Tokens
    r")"
)
"""Pattern of credentials that have a known prefix, such as ``hf_``."""
_PARAMETER = re.compile(
    r"(?P<name>\b[\w-]*(?:secret|password|passwd|signature|credential|api_?key|access_?key)[\w-]*"
    r"['\"]?\s*[=:]\s*['\"]?)(?P<value>[^\s'\",;&)}]+)",
    re.IGNORECASE,
)
_TOKEN_PARAMETER = re.compile(
    r"(?P<name>(?<![A-Za-z0-9])(?:[\w-]*[_-])?token['\"]?\s*[=:]\s*['\"]?)(?P<value>[^\s'\",;&)}<|\[]{6,})",
    re.IGNORECASE,
)
"""Pattern of a credential parameter such as ``hf_token``. It matches neither ``tokenizer`` nor special
tokens such as ``eos_token: </s>``.
"""
_SECRET_NAME = re.compile(
    r"SECRET|TOKEN(?!IZER)|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_KEY|SAS|ACCOUNT_KEY|STORAGE_KEY"
    r"|CONNECTION_STRING"
)


def redact_credentials(text: str) -> str:
    """Replace credentials in a string with `***`.

    Credentials are recognized by parameter names such as `hf_token`, by known prefixes such as
    `hf_`, and by comparison with the values of secret environment variables. In a URL, the user
    name and password are replaced, and also the complete query.
    """
    text = _URL_USERINFO.sub(r"\g<scheme>***@", text)
    text = _URL_QUERY.sub(r"\g<url>?***", text)
    text = _PARAMETER.sub(r"\g<name>***", text)
    text = _TOKEN_PARAMETER.sub(r"\g<name>***", text)
    text = _KNOWN_TOKENS.sub("***", text)
    for secret in _list_secret_values():
        text = text.replace(secret, "***")
    return text


def _list_secret_values() -> list[str]:
    """Return the values of environment variables that may be secrets, longest first.

    A value is listed if the name of the variable matches `_SECRET_NAME`, for example `HF_TOKEN`,
    and the value has at least 6 characters and is not an existing path.
    """
    secrets = {
        value
        for name, value in os.environ.items()
        if len(value) >= 6 and _SECRET_NAME.search(name.upper()) and not _is_existing_path(value)
    }
    return sorted(secrets, key=len, reverse=True)


def _is_existing_path(value: str) -> bool:
    """Return whether the value of an environment variable is an existing path.

    The value must begin with `/`, `~`, or `./`.

    Messages may show such a value, even if the name of the variable suggests a secret. For example,
    GOOGLE_APPLICATION_CREDENTIALS contains the path of a secret, not the secret.
    """
    try:
        return value.startswith(("/", "~", "./")) and Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # the name is too long, of an unknown user, or contains a NUL
        return False
