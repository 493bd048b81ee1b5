"""The one exception a user of the converters sees."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint, an output folder or an option that is refused.

    The message is one line: it names the file or key at fault and, where there is one, the remedy.
    """
