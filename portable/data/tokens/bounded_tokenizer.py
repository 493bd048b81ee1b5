"""Call tokenizers with time and memory limits, because their files may be malicious.

A pipeline in ``tokenizer.json`` can double a text at every step, and a regular expression in it can
backtrack for hours. Each call therefore runs in a separate thread, and the calling thread raises an
error if a limit is exceeded. This works because the tokenizers library releases the GIL while it
encodes or decodes a batch. A call that exceeds a limit cannot be stopped, and runs on until it
returns or the process ends.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.errors import raise_unless_panic
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SECONDS = 2.0
"""Fixed part of the time limit of a call, in seconds. :data:`SECONDS_PER_CHARACTER` is added for its text."""
SECONDS_PER_CHARACTER = 1e-5
"""Time that a call may take per character, in seconds. The slowest pipelines of the tokenizers library in use
need a tenth of it.
"""
SLOW_SECONDS, SLOW_SECONDS_PER_CHARACTER = 10.0, 1e-4
"""Time limits for tokenizers that are written in Python, which replace the two limits above.

They are higher because Python is slower, and because the first call of some tokenizers loads a dictionary.
"""
MEMORY = 1 << 30
"""Fixed part of the memory by which the process may grow during a call, in bytes.
:data:`MEMORY_PER_CHARACTER` is added for the text.
"""
MEMORY_PER_CHARACTER = 512
"""Memory that a call may use per character, in bytes. Even if each character becomes a token, the text and
offsets in Rust and the token id in Python need less.
"""
_INTERVAL = 0.05
"""Interval in seconds between checks of the limits."""


def encode_text(tokenizer: Any, text: Any, pair: Any = None, **options: Any) -> Any:
    """Encode one or several texts, like ``tokenizer(text, ...)``.

    The time limit is :data:`SECONDS`, or :data:`SLOW_SECONDS` for a tokenizer that is not fast. The
    memory limit is :data:`MEMORY`. Both limits increase with the number of characters.

    Args:
        tokenizer: Transformers tokenizer.
        text: A text or a list of texts.
        pair: Second text, if ``text`` is the first text of a pair. None otherwise.
        options: Further arguments of the tokenizer.

    Returns:
        The ``BatchEncoding`` of the tokenizer.

    Raises:
        UserError: If the tokenizer cannot encode the text, or exceeds the time or memory limit.
        MemoryError: If the tokenizer raises MemoryError.
    """
    texts = [text] if isinstance(text, str) else text
    characters = sum(map(len, texts)) + len(pair or "")
    arguments = (text,) if pair is None else (text, pair)
    return _call_within_limits(
        tokenizer, lambda: tokenizer(*arguments, **options), characters, "encode a text"
    )


def encode_targets(tokenizer: Any, text: Any, **options: Any) -> Any:
    """Encode the target texts of a seq2seq task, like ``tokenizer(text_target=text, ...)``.

    In all other respects, this function behaves like :func:`encode_text` without a pair.
    """
    characters = sum(map(len, [text] if isinstance(text, str) else text))
    return _call_within_limits(
        tokenizer, lambda: tokenizer(text_target=text, **options), characters, "encode a text"
    )


def decode(tokenizer: Any, tokens: Sequence[int], **options: Any) -> str:
    """Decode tokens, like ``tokenizer.decode(tokens, ...)``.

    The limits of :func:`encode_text` apply. Each token counts as 16 characters.

    Raises:
        UserError: If the tokenizer cannot decode the tokens, or exceeds the time or memory limit.
    """

    def run() -> str:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:  # of the decoding methods, only decode_batch releases the GIL
            backend.decode_batch([[int(token) for token in tokens]])
        text: str = tokenizer.decode(tokens, **options)
        return text

    return _call_within_limits(tokenizer, run, 16 * len(tokens), "decode tokens")  # type: ignore[no-any-return]


@contextmanager
def convert_tokenizer_errors(tokenizer: Any, action: str) -> Iterator[None]:
    """Convert exceptions that a tokenizer raises within this context to UserError.

    Rust panics are also converted. UserError, MemoryError, KeyboardInterrupt and SystemExit are
    raised unchanged.

    Args:
        tokenizer: Tokenizer. The message contains its folder or Hub id.
        action: Verb phrase for the error message, such as "encode a text".
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        raise_unless_panic(error)
        reason = f"{type(error).__name__}: {to_one_line(error)[:200]}"
        raise _build_tokenizer_error(tokenizer, f"cannot {action} ({reason})") from error


def _build_tokenizer_error(tokenizer: Any, reason: str) -> UserError:
    """Build the error for a tokenizer that cannot be used, from its name, the reason and a remedy."""
    name = getattr(tokenizer, "name_or_path", None)
    subject = repr(str(name)) if name else "the tokenizer"
    return UserError(
        f"data.tokenizer: {subject} {reason}; use another tokenizer, or set data.tokenizer to null to train "
        "a tokenizer"
    )


def _call_within_limits(tokenizer: Any, function: Callable[[], Any], characters: int, action: str) -> Any:
    """Call ``function`` in a daemon thread, and wait for it with a time and memory limit.

    Args:
        tokenizer: Tokenizer that ``function`` calls. The time limit is higher for slow
            tokenizers.
        function: Function to call.
        characters: Number of characters to process. The limits increase with this number.
        action: Verb phrase, such as "encode a text", used in error messages.

    Returns:
        The result of ``function``.

    Raises:
        UserError: If the call exceeds a limit or raises an exception. If it exceeds a limit,
            the thread is not stopped.
        MemoryError: If the call raises MemoryError.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    fast = getattr(tokenizer, "is_fast", False)
    seconds_per_call = SECONDS if fast else SLOW_SECONDS
    per_character = SECONDS_PER_CHARACTER if fast else SLOW_SECONDS_PER_CHARACTER
    most_seconds = seconds_per_call + per_character * characters
    most_memory = _read_resident_memory() + MEMORY + MEMORY_PER_CHARACTER * characters
    start_times = time.monotonic(), time.process_time()
    thread = threading.Thread(target=run, name="tokenizer", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_INTERVAL)
        # Use the smaller of wall and CPU time: the process may have to wait for a core, or may use several
        # cores.
        seconds = min(time.monotonic() - start_times[0], time.process_time() - start_times[1])
        if thread.is_alive() and (seconds > most_seconds or _read_resident_memory() > most_memory):
            raise _build_tokenizer_error(tokenizer, f"takes too much time or memory to {action}")
    with convert_tokenizer_errors(tokenizer, action):
        if errors:
            raise errors[0]
    return results[0]


def _read_resident_memory() -> int:
    """Return the resident memory of this process in bytes. 0 on systems without ``/proc``."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
