"""Expand the image placeholders in a rendered conversation."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from portable.data.sources.documents import count_images
from portable.data.tokens.rendering import AnswerContext, build_template_error
from portable.formatting import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.data.tokens.rendering import RenderedConversation


def expand_placeholders(
    draft: RenderedConversation, placeholder: str, replacements: Sequence[str]
) -> RenderedConversation:
    """Replace each image placeholder with the text for its image, and adjust all character positions.

    Args:
        draft: Rendered conversation. If the conversation was split into several samples, ``draft``
            contains only its first messages.
        placeholder: Text that the template writes for each image.
        replacements: Text for each image of the complete conversation, in order. If ``draft``
            contains only the first messages, only the first texts are used.

    Raises:
        RecordError: If the number of placeholders differs from the number of images, because the
            template drops images or the record contains the placeholder as text.
    """
    conversation = draft.conversation
    num_images = 0 if conversation is None else count_images(conversation.messages)
    starts = _find_all(draft.text, placeholder)
    if conversation is not None and len(starts) != num_images:
        raise build_template_error(
            conversation,
            f"the rendered text contains the image placeholder {placeholder!r} "
            f"{format_count(len(starts), 'time')}, but the record has {format_count(num_images, 'image')}; "
            "use the model's template, or remove the placeholder from the text of the record",
        )
    if not starts:
        return draft
    growths = [len(text) - len(placeholder) for text in replacements[:num_images]]
    moved_by = [0]
    for growth in growths:
        moved_by.append(moved_by[-1] + growth)

    def move(position: int) -> int:
        """Convert a position in ``draft.text`` to the corresponding position in the expanded text.

        The position may be the start or the end of a placeholder, but must not be inside one.
        """
        return position + moved_by[bisect_right(starts, position - 1)]

    def expand(text: str) -> str:
        """Replace each placeholder in ``text`` with the text for its image.

        ``text`` must begin at the start of the conversation, because the placeholders are matched
        to the images in order. If there are more placeholders than images, the remaining
        placeholders are left unchanged.
        """
        pieces = text.split(placeholder)
        count = min(len(pieces) - 1, num_images)
        head = "".join(piece + image for piece, image in zip(pieces, replacements[:count], strict=False))
        return head + placeholder.join(pieces[count:])

    return replace(
        draft,
        text=expand(draft.text),
        trained_spans=tuple((move(start), move(end)) for start, end in draft.trained_spans),
        answer_starts=tuple(
            move(start)
            if isinstance(start, int)
            else AnswerContext(
                expand(start.prompted), None if start.unprompted is None else expand(start.unprompted)
            )
            for start in draft.answer_starts
        ),
        answer_ends=tuple(move(end) if isinstance(end, int) else expand(end) for end in draft.answer_ends),
        image_spans=tuple(
            (move(start), move(start) + len(text)) for start, text in zip(starts, replacements, strict=False)
        ),
    )


def _find_all(text: str, part: str) -> list[int]:
    """Return the start positions of all occurrences of ``part`` in a text."""
    positions, start = list[int](), text.find(part)
    while start >= 0:
        positions.append(start)
        start = text.find(part, start + len(part))
    return positions
