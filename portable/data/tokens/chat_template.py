"""Encode conversations with a chat template, and compute their loss masks.

The template renders a conversation as one text. The assistant's answers in this text are located in
one of two ways:

- The template marks them with ``{% generation %}``.
- Otherwise, prefixes of the conversation are rendered. The messages before an answer, rendered with
  the generation prompt, determine its start. The messages up to and including the answer determine
  its end.

Some templates render previous turns differently from the last turn. For example, Qwen3 removes the
reasoning of previous turns. The complete text then does not begin with the rendered prefixes. In
this case, each answer becomes a separate sample, in the context that the model sees at inference.

Some templates end a conversation with special tokens that do not follow earlier answers. For
example, Phi-3 adds its end-of-text token, and GPT-OSS writes its return token instead of its end
token. A rendered prefix then ends with special tokens that the complete text does not have at this
place. The comparison of the two texts ignores this difference.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from portable.data.sources.documents import RecordError, format_name_list
from portable.data.tokens import bounded_tokenizer, limited_calls
from portable.data.tokens.image_text import expand_placeholders
from portable.data.tokens.rendering import (
    TEMPLATE_DATE,
    AnswerContext,
    AnswerNotFoundError,
    RenderedConversation,
    TemplateRenderer,
    TrainOn,
    build_answer_not_found_error,
    build_no_template_error,
    build_template_error,
    check_answer_words,
)
from portable.data.tokens.tokenizer import CHATML, starts_with_prefix
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.data.images import ImageFileState, ImageReader, ImageSize, LoadedImage
    from portable.data.sources.documents import Conversation, Document
    from portable.data.tokens.image_processing import ImageProcessor
    from portable.data.tokens.special_tokens import Frame

BUILT_IN_TEMPLATES = {"chatml": CHATML}
CONVERSION_VERSION = 4  # version of the conversion to tokens and masks; a change rebuilds the caches
_SPECIAL_TOKEN_PATTERN = re.compile(r"<\|[^\s<>|'\"]+\|>")


class PlacedImage(NamedTuple):
    """Image with its position in a sample.

    Attributes:
        data: Content of the image file.
        digest: BLAKE2b digest of the image file (16 bytes).
        size: Size at which the image is passed to the model's processor.
        first_token: Index of the image's first token in the sample.
        num_tokens: Number of image tokens, including the special tokens around rows and crops.
    """

    data: bytes
    digest: bytes
    size: ImageSize
    first_token: int
    num_tokens: int


@dataclass
class EncodedConversations:
    """Encoded samples of several conversations, and counts for notes and checks.

    Attributes:
        tokens: Tokens of each sample, int64 ``[tokens]``.
        trained_masks: Loss mask of each sample, bool ``[tokens]``.
        images: Images of each sample.
        image_files: States of the local image files of all documents, including files that cannot
            be read.
        num_stopping: Number of samples whose loss mask includes the end token of the last answer.
        end_token_counts: Number of samples whose last answer ends with a given token, keyed by
            token id.
        unstopped_example: Excerpt of a sample whose loss mask does not include the end token of the
            last answer. It consists of the last tokens in the mask and the tokens after them,
            decoded to text. Empty if all loss masks include the end token.
        unmatched_prompt: Text at the end of the generation prompt that is missing before an answer
            in a complete conversation, because the template does not write it there. The model is
            trained without this text. Only the first such text is kept. Empty if there is none.
        samples_per_document: Number of samples of each document. 0 for a refused record.
        refused_records: Errors of the records that cannot be rendered or masked. These records have
            no samples.
        counts: Counts, keyed by name. Answers and reasoning that do not contribute to the loss are
            not counted:

            - ``records``: documents with samples.
            - ``apart``: documents whose answers became separate samples, because the template
              changes previous turns.
            - ``turns``: separate samples of these documents, one per answer.
            - ``think``: documents with reasoning.
            - ``thoughts``: answers with reasoning.
            - ``lost``: answers whose reasoning the template drops.
            - ``empty``: answers that have neither text nor tool calls nor reasoning.
    """

    tokens: list[npt.NDArray[np.int64]] = field(default_factory=list)
    trained_masks: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    images: list[list[PlacedImage]] = field(default_factory=list)
    image_files: list[ImageFileState] = field(default_factory=list)
    num_stopping: int = 0
    end_token_counts: Counter[int] = field(default_factory=Counter)
    unstopped_example: str = ""
    unmatched_prompt: str = ""
    samples_per_document: list[int] = field(default_factory=list)
    refused_records: list[RecordError] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def load_chat_template(tokenizer: Any, setting: str | None) -> str | dict[str, str]:
    """Load the chat template that ``data.chat_template`` selects.

    Args:
        tokenizer: Transformers tokenizer.
        setting: Name of one of the tokenizer's templates, path of a file, or name of a built-in
            template, searched in this order. None selects the tokenizer's own template or
            templates.

    Returns:
        Text of the template. If ``setting`` is None and the tokenizer has several templates, a
        mapping from the name of each template to its text. Conversations with tools are rendered
        with the entry ``tool_use`` if it exists, and all others with ``default``. Further entries
        are not used.

    Raises:
        UserError: If the template does not exist, if its file cannot be read, or if ``setting`` is
            None and the tokenizer has several templates but none named ``default``.
    """
    tokenizer_templates = getattr(tokenizer, "chat_template", None)
    if setting is None:
        if not tokenizer_templates:
            raise build_no_template_error()
        if isinstance(tokenizer_templates, dict) and "default" not in tokenizer_templates:
            raise UserError(
                "data.chat_template: the tokenizer has several templates "
                f"({format_name_list(tokenizer_templates)}); set data.chat_template to one of them"
            )
        return tokenizer_templates  # type: ignore[no-any-return]
    if isinstance(tokenizer_templates, dict) and setting in tokenizer_templates:
        return str(tokenizer_templates[setting])
    path = Path(setting)
    if path.suffix in (".jinja", ".jinja2", ".j2", ".txt") or path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise UserError(
                    f"data.chat_template: {setting}: is not UTF-8 text; convert the file to UTF-8 (for "
                    "example with iconv -f ENCODING -t utf-8)"
                ) from error
            raise UserError(
                f"data.chat_template: {setting}: cannot be read ({to_one_line(error.strerror or error)}); "
                "check the path"
            ) from error
    if setting in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[setting]
    names = [*(tokenizer_templates if isinstance(tokenizer_templates, dict) else ()), *BUILT_IN_TEMPLATES]
    raise UserError(
        f"data.chat_template: {setting!r} is neither a file nor a template of this tokenizer; use the "
        f"path of a template file, {', '.join(names)}, or null for the template of the tokenizer"
    )


class _MaskedDrafts(NamedTuple):
    """Rendered samples of a document, called drafts, with their tokens, loss masks and images.

    Attributes:
        drafts: Rendered samples.
        encodings: Encoding of each rendered sample.
        masks: Loss mask of each rendered sample, bool ``[tokens]``.
        images: Images of the document.
    """

    drafts: list[RenderedConversation]
    encodings: Sequence[Any]
    masks: list[npt.NDArray[np.bool_]]
    images: list[LoadedImage]


class _TokenMatch(NamedTuple):
    """Result of comparing the tokens of a text with the start of the complete conversation.

    Attributes:
        num_equal: Length of the common prefix, in tokens.
        rest: Tokens of the text after the common prefix.
    """

    num_equal: int
    rest: list[int]


class ConversationEncoder:
    """Encoder that renders conversations, tokenizes them and computes their loss masks.

    Args:
        tokenizer: Fast transformers tokenizer. Slow tokenizers do not provide the positions of
            tokens in the text.
        templates: Templates from :func:`load_chat_template`. None if no template is available. In
            this case, only plain-text completions can be encoded.
        frame: Special tokens to put before and after plain-text completions, which are encoded
            without a template.
        train_on: Value of ``data.train_on``, which selects the tokens that contribute to the loss.
            If it is None, the tokens depend on the record. If the record has a prompt and
            ``data.roles_to_train`` has its default value, its completion is selected. Otherwise,
            the messages of the roles in ``data.roles_to_train`` are selected.
        split_turns: Whether each answer becomes a separate sample that also contains the messages
            before it. If an answer cannot be located, a conversation may also be split if this is
            False.
        pairs: Whether consecutive documents are the chosen and the rejected completion of a pair.
            The loss mask that begins later is then extended, so that both masks begin at the same
            token index.
        kwargs: Additional variables for the template.
        image_reader: Image reader. None if records cannot contain images.
        image_processor: Image processor of the model. None if records cannot contain images.

    Raises:
        UserError: If the template or the tokenizer cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        templates: str | dict[str, str] | None,
        frame: Frame,
        *,
        train_on: TrainOn | None = None,
        split_turns: bool = False,
        pairs: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        image_reader: ImageReader | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"data.tokenizer: {type(tokenizer).__name__} is not a fast tokenizer, but conversations need "
                "a fast tokenizer; use a tokenizer with a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._image_reader = image_reader
        self._image_processor = image_processor
        self._renderer = TemplateRenderer(
            templates,
            {**tokenizer.special_tokens_map, **(kwargs or {})},
            train_on,
            split_turns,
            frame.prefix,
            frame.suffix,
            tokenizer.eos_token or "",
        )

    @property
    def cache_key(self) -> str:
        """Text for use in cache keys.

        It contains all settings that determine the tokens and masks, except the tokenizer and
        the special tokens in ``frame``.
        """
        renderer = self._renderer
        content = [
            CONVERSION_VERSION,
            renderer.templates,
            renderer.train_on,
            renderer.split_turns,
            self._pairs,
            renderer.variables,
            TEMPLATE_DATE,
        ]
        if self._image_reader is not None and self._image_processor is not None:
            content += [self._image_processor.cache_key, self._image_reader.cache_key]
        return json.dumps(content, sort_keys=True, default=str)

    @property
    def image_reader(self) -> ImageReader | None:
        """Image reader. None if records cannot contain images."""
        return self._image_reader

    @property
    def missing_tokens(self) -> list[str]:
        """Tokens such as ``<|im_start|>`` that the template writes but the tokenizer lacks.

        The property searches the source of all templates for tokens of the form ``<|...|>``. Tokens
        of other forms are not found.
        """
        templates = self._renderer.templates
        texts = templates.values() if isinstance(templates, dict) else [templates or ""]
        written = dict.fromkeys(_SPECIAL_TOKEN_PATTERN.findall(" ".join(texts)))
        vocabulary = self._tokenizer.get_vocab()
        return [token for token in written if token not in vocabulary]

    def encode_documents(
        self, documents: Sequence[Document], *, collect: bool = False
    ) -> EncodedConversations:
        """Tokenize conversations and completions, and compute their loss masks.

        Args:
            documents: Conversations and completions. If ``pairs`` is set, there are two documents
                per record.
            collect: Whether to skip records that cannot be rendered or masked, or whose images
                cannot be loaded, and collect their errors.

        Returns:
            The tokens, loss masks and images of all samples. A document may have several samples.

        Raises:
            RecordError: If a record cannot be rendered or masked, or if an image of it cannot be
                loaded, and ``collect`` is False. The message contains the location of the record.
            UserError: If the template or the tokenizer exceeds its time or memory limit, or if the
                tokenizer cannot encode the texts.
        """
        drafts: list[list[RenderedConversation] | RecordError] = limited_calls.call_within_limits(
            partial(self._renderer.render_documents, collect=collect), [*map(_remove_images, documents)]
        )
        encoded = EncodedConversations()
        images: list[list[LoadedImage]] = []
        for index, document in enumerate(documents):
            images.append([])
            try:
                if not isinstance(document_drafts := drafts[index], RecordError):
                    images[index] = self._load_images(document, encoded.image_files)
                    drafts[index] = self._expand_images(document_drafts, images[index])
            except RecordError as error:
                if not collect:
                    raise
                drafts[index] = error
        rendered = [
            document_drafts for document_drafts in drafts if not isinstance(document_drafts, RecordError)
        ]
        encodings = iter(
            self._encode_texts([draft.text for document_drafts in rendered for draft in document_drafts])
        )
        size = 2 if self._pairs else 1
        for first in range(0, len(documents), size):
            samples: list[_MaskedDrafts] = []
            refusal: RecordError | None = None
            for document, document_drafts, document_images in zip(
                documents[first : first + size],
                drafts[first : first + size],
                images[first : first + size],
                strict=True,
            ):
                if isinstance(document_drafts, RecordError):
                    refusal = refusal or document_drafts
                    continue
                draft_encodings = [next(encodings) for _ in document_drafts]
                try:
                    samples.append(
                        self._compute_masks(
                            document, document_drafts, draft_encodings, document_images, encoded
                        )
                    )
                except RecordError as error:
                    if not collect:
                        raise
                    refusal = refusal or error
            if refusal is not None:
                encoded.refused_records.append(refusal)
                encoded.samples_per_document += [0] * len(documents[first : first + size])
                continue
            for sample in samples:
                self._append_samples(*sample, encoded)
        if self._pairs:  # the loss masks of both completions must begin at the same token
            for chosen_mask, rejected_mask in zip(
                encoded.trained_masks[::2], encoded.trained_masks[1::2], strict=True
            ):
                first, second = int(chosen_mask.argmax()), int(rejected_mask.argmax())
                chosen_mask[second:first] = rejected_mask[first:second] = True
        return encoded

    def _compute_masks(
        self,
        document: Document,
        drafts: list[RenderedConversation],
        encodings: Sequence[Any],
        images: list[LoadedImage],
        encoded: EncodedConversations,
    ) -> _MaskedDrafts:
        """Compute the loss masks of a document's rendered samples.

        If an answer cannot be found in the text of the conversation, this method renders and
        encodes the document again with one sample per answer.

        Args:
            document: The document.
            drafts: Its rendered samples.
            encodings: Encodings of the rendered samples.
            images: Images of the document.
            encoded: Result for all documents. This method updates its ``counts``. It also sets its
                ``unmatched_prompt`` if the generation prompt ends with text that the template does
                not write before an answer.

        Returns:
            The final rendered samples, encodings, masks and images.

        Raises:
            AnswerNotFoundError: If an answer cannot be found even in a separate sample.
            RecordError: If the template drops part of an answer.
        """
        try:
            return _MaskedDrafts(drafts, encodings, self._build_masks(drafts, encodings, encoded), images)
        except AnswerNotFoundError:
            if document.conversation is None or not drafts[0].separable_answers:
                raise
        drafts = limited_calls.call_within_limits(
            self._renderer.render_turns, document.conversation, drafts[0].separable_answers
        )
        drafts = self._expand_images(drafts, images)
        encodings = self._encode_texts([draft.text for draft in drafts])
        masks = self._build_masks(drafts, encodings, encoded)
        encoded.counts.update(apart=1, turns=len(drafts))
        return _MaskedDrafts(drafts, encodings, masks, images)

    def _load_images(self, document: Document, states: list[ImageFileState]) -> list[LoadedImage]:
        """Load the images of a document.

        Args:
            document: The document.
            states: List to which the states of local image files are appended.

        Raises:
            RecordError: If an image cannot be read, or if images are not enabled.
        """
        conversation = document.conversation
        if conversation is None or not conversation.images:
            return []
        if self._image_reader is None:
            raise RecordError(
                f"data.images: {conversation.location}: the record has an image, but data.images is "
                "not true; set data.images: true and use a model that accepts images, or remove the images"
            )
        return [
            self._image_reader.load_image(reference, conversation.location, states)
            for reference in conversation.images
        ]

    def _expand_images(
        self, drafts: list[RenderedConversation], images: list[LoadedImage]
    ) -> list[RenderedConversation]:
        """Replace each image placeholder in the rendered samples of a document with the text for its image.

        Args:
            drafts: Rendered samples.
            images: Images of the document.

        Raises:
            RecordError: If the processor does not support the size of an image, or if the number of
                placeholders differs from the number of images.
        """
        processor = self._image_processor
        if processor is None or drafts[0].conversation is None:
            return drafts
        replacements = []
        for image in images:
            try:
                replacements.append(processor.compute_replacement(image.size))
            except Exception as error:  # processors raise exceptions of several types
                size = f"{image.size.width} x {image.size.height} pixels"
                raise RecordError(
                    f"data.source: {drafts[0].conversation.location}: the model's image processor rejects "
                    f"an image of {size} ({to_one_line(error)[:200]}); remove or resize the image"
                ) from error
        return [expand_placeholders(draft, processor.placeholder, replacements) for draft in drafts]

    def _append_samples(
        self,
        drafts: Sequence[RenderedConversation],
        encodings: Sequence[Any],
        masks: Sequence[npt.NDArray[np.bool_]],
        images: Sequence[LoadedImage],
        encoded: EncodedConversations,
    ) -> None:
        """Append the samples of a document and their counts to ``encoded``.

        The special tokens before and after a plain-text completion are added here. The tokens
        before the completion are omitted if the encoding already begins with them. Other samples
        already contain their special tokens.

        Args:
            drafts: Rendered samples of the document.
            encodings: Encodings of the texts in ``drafts``.
            masks: Loss mask of each encoding, bool ``[tokens]``.
            images: Images of the document.
            encoded: Result, modified in place.
        """
        for draft, encoding, within in zip(drafts, encodings, masks, strict=True):
            prefix = () if starts_with_prefix(encoding.ids, draft.prefix) else draft.prefix
            tokens = np.array([*prefix, *encoding.ids, *draft.suffix], dtype=np.int64)
            ends = np.full(len(prefix), draft.trains_all), within, np.ones(len(draft.suffix), dtype=bool)
            encoded.tokens.append(tokens)
            encoded.trained_masks.append(np.concatenate(ends))
            encoded.images.append(
                [
                    PlacedImage(image.data, image.digest, image.size, len(prefix) + first, last - first)
                    for image, (first, last) in zip(
                        images, self._find_image_tokens(draft, encoding), strict=False
                    )
                ]
            )
            self._count_end_token(draft, tokens, encoded.trained_masks[-1], encoded)
        shown = [shown for draft in drafts for shown in draft.reasoning_shown]
        encoded.samples_per_document.append(len(drafts))
        encoded.counts.update(
            records=1,
            think=bool(shown),
            thoughts=len(shown),
            lost=shown.count(False),
            empty=sum(draft.num_empty_answers for draft in drafts),
        )

    def _find_image_tokens(self, draft: RenderedConversation, encoding: Any) -> list[tuple[int, int]]:
        """Find the token range of each image in a rendered sample.

        Returns:
            Start and exclusive end of each range.

        Raises:
            RecordError: If the record's text contains image tokens outside these ranges. The model would
                interpret them as part of an image.
        """
        if self._image_processor is None:
            return []
        ranges = [
            (_find_token_at_char(encoding, start), _find_token_after_char(encoding, end, len(draft.text)))
            for start, end in draft.image_spans
        ]
        stray = np.isin(encoding.ids, self._image_processor.image_token_ids)
        for first, last in ranges:
            stray[first:last] = False
        if stray.any() and draft.conversation is not None:
            token = bounded_tokenizer.decode(self._tokenizer, [encoding.ids[int(stray.argmax())]])
            raise build_template_error(
                draft.conversation,
                f"a message contains {token!r}, the image placeholder token; remove this token from the text",
            )
        return ranges

    # -- masks ----------------------------------------------------------------------------------------------

    def _encode_texts(self, texts: list[str]) -> Any:
        """Encode texts without special tokens. Returns one ``tokenizers.Encoding`` per text."""
        if not texts:
            return []
        encoded = bounded_tokenizer.encode_text(
            self._tokenizer,
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return encoded.encodings

    def _build_masks(
        self, drafts: list[RenderedConversation], encodings: Sequence[Any], encoded: EncodedConversations
    ) -> list[npt.NDArray[np.bool_]]:
        """Build the loss masks of the rendered samples. See :meth:`_build_mask`."""
        return [
            self._build_mask(draft, encoding, encoded)
            for draft, encoding in zip(drafts, encodings, strict=True)
        ]

    def _build_mask(
        self, draft: RenderedConversation, encoding: Any, encoded: EncodedConversations
    ) -> npt.NDArray[np.bool_]:
        """Build the loss mask of a rendered sample, bool ``[tokens]``.

        The mask is True for tokens that contribute to the loss. Image tokens never contribute.

        Args:
            draft: Rendered sample.
            encoding: Encoding of the text of ``draft``.
            encoded: Result for all documents. This method sets its ``unmatched_prompt`` if the
                generation prompt ends with text that is missing before an answer of the sample. The
                field then contains the missing text. A text from an earlier sample is kept.

        Raises:
            AnswerNotFoundError: If the start or end of an answer cannot be determined, or if the
                template drops the reasoning of some answers but not of others.
            RecordError: If the template drops part of an answer or renders no text for it, or if
                the text contains image tokens that do not belong to an image.
        """
        if draft.separable_answers and len(set(draft.reasoning_shown)) > 1 and draft.conversation is not None:
            # The template drops the reasoning of previous answers. Raising this error selects one sample per
            # answer.
            raise build_answer_not_found_error(draft.conversation, draft.separable_answers[0])
        trained = np.zeros(len(encoding.ids), dtype=bool)
        if draft.trains_all:
            trained[:] = True
        for start, end in draft.trained_spans:
            trained[
                _find_token_at_char(encoding, start) : _find_token_after_char(encoding, end, len(draft.text))
            ] = True
        for index, opened, closed in zip(
            draft.searched_answers, draft.answer_starts, draft.answer_ends, strict=True
        ):
            assert draft.conversation is not None
            first = self._find_first_token(draft, draft.conversation, encoding, index, opened, encoded)
            last = self._find_stop_token(draft, draft.conversation, encoding, index, closed)
            if last <= first:
                raise build_template_error(
                    draft.conversation,
                    f"the template renders no text for the answer in message {index + 1}; remove the record, "
                    "or use another template",
                )
            trained[first:last] = True
        for first, last in self._find_image_tokens(draft, encoding):
            trained[first:last] = False
        if draft.answer_words and draft.conversation is not None:
            check_answer_words(
                draft.conversation, draft.answer_words, _join_trained_text(draft.text, encoding, trained)
            )
        return trained

    def _find_first_token(
        self,
        draft: RenderedConversation,
        conversation: Conversation,
        encoding: Any,
        index: int,
        opened: int | AnswerContext,
        encoded: EncodedConversations,
    ) -> int:
        """Return the index of the first token of an answer.

        If the character index of the answer is not known, tokens are compared. The generation
        prompt is the text with which the template begins an answer. Only an answer of the assistant
        can be found in this way. It starts after the tokens of ``encoding`` that match the rendered
        messages before the answer and the generation prompt. Unless the prompt is empty, at least a
        part of it must match.

        Args:
            draft: Rendered sample.
            conversation: Conversation of ``draft``.
            encoding: Encoding of the text of ``draft``.
            index: Index of the answer's message.
            opened: Character index at which the answer starts. If it is not known, the rendered
                messages before the answer, with and without the generation prompt.
            encoded: Result for all documents, updated in place. If the end of the generation prompt
                is missing before the answer, the missing text is stored in ``unmatched_prompt``,
                unless a text is already stored there.

        Raises:
            AnswerNotFoundError: If the start of the answer cannot be determined.
        """
        if isinstance(opened, int):
            return _find_token_at_char(encoding, opened)
        if conversation.messages[index]["role"] != "assistant":
            raise build_answer_not_found_error(conversation, index)
        # The generation prompt may contain the beginning of the answer, such as "<think>".
        prompted, before = opened
        if before is None:
            raise build_answer_not_found_error(conversation, index)
        context, rest = self._match_tokens(encoding, before)
        first, prompt_rest = self._match_tokens(encoding, prompted)
        ids = encoding.ids
        # The part of the prompt before an answer ends with an added token or whitespace. Any tokens after it
        # match only by chance.
        while first > context and not (ids[first - 1] in self._added_ids or self._is_blank(ids[first - 1])):
            first -= 1
            prompt_rest.insert(0, ids[first])
        # The answer must start after at least a part of the generation prompt, unless the prompt is empty.
        is_within_prompt = first > context or prompted == before
        if not self._has_only_special(rest) or not is_within_prompt or first < context or first == len(ids):
            raise build_answer_not_found_error(conversation, index)
        encoded.unmatched_prompt = encoded.unmatched_prompt or bounded_tokenizer.decode(
            self._tokenizer, prompt_rest
        )
        return first

    def _find_stop_token(
        self,
        draft: RenderedConversation,
        conversation: Conversation,
        encoding: Any,
        index: int,
        closed: int | str,
    ) -> int:
        """Return the index of the first token after an answer.

        Args:
            draft: Rendered sample.
            conversation: Conversation of ``draft``.
            encoding: Encoding of the text of ``draft``.
            index: Index of the answer's message.
            closed: End of the answer in the text of ``draft``. An integer is the character index of
                the end. A string is the rendered text of all messages up to and including the
                answer. In this case, the character index is not known, and the end is found by
                comparing the tokens of the string with ``encoding``.

        Raises:
            AnswerNotFoundError: If ``closed`` is a string, and ``encoding`` does not begin with its
                tokens. Special tokens and whitespace at the end of ``closed`` do not have to match.
        """
        if isinstance(closed, int):
            return _find_token_after_char(encoding, closed, len(draft.text))
        last, rest = self._match_tokens(encoding, closed)
        if not self._has_only_special(rest):
            raise build_answer_not_found_error(conversation, index)
        return last

    def _match_tokens(self, encoding: Any, text: str) -> _TokenMatch:
        """Encode ``text``, and compare its tokens with the tokens at the start of ``encoding``."""
        ids: list[int] = self._encode_texts([text])[0].ids
        count = next(
            (
                index
                for index, (token, whole_token) in enumerate(zip(ids, encoding.ids, strict=False))
                if token != whole_token
            ),
            min(len(ids), len(encoding.ids)),
        )
        return _TokenMatch(count, ids[count:])

    # -- end tokens ------------------------------------------------------------------------------------------

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return frozenset(self._tokenizer.all_special_ids) | {
            number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        """Ids of all special tokens and other added tokens."""
        return self._special_ids | frozenset(self._tokenizer.get_added_vocab().values())

    @cached_property
    def _blank_tokens(self) -> dict[int, bool]:
        """Cached results of :meth:`_is_blank`, keyed by token. Initially empty."""
        return {}

    def _is_blank(self, token: int) -> bool:
        """Return whether the text of a token is empty or only whitespace."""
        if token not in self._blank_tokens:
            self._blank_tokens[token] = not bounded_tokenizer.decode(self._tokenizer, [token]).strip()
        return self._blank_tokens[token]

    def _has_only_special(self, tokens: list[int]) -> bool:
        """Return whether all tokens are special tokens or whitespace."""
        return all(token in self._special_ids or self._is_blank(token) for token in tokens)

    def _count_end_token(
        self,
        draft: RenderedConversation,
        tokens: npt.NDArray[np.int64],
        trained: npt.NDArray[np.bool_],
        encoded: EncodedConversations,
    ) -> None:
        """Find the end token of a sample's last answer, and update the counts in ``encoded``.

        The end token is the first special token after the last words of the answer. Some tokenizers
        do not mark their end-of-turn token as special, but only as an added token. Therefore, if no
        special token follows the words, the last token of the answer is the end token if it is an
        added token. Otherwise, the answer has no end token.

        Args:
            draft: Rendered sample.
            tokens: Tokens of the sample, int64 ``[tokens]``.
            trained: Loss mask, bool ``[tokens]``.
            encoded: Result in which to update ``end_token_counts``, ``num_stopping`` and
                ``unstopped_example``.
        """
        last = int(np.flatnonzero(trained)[-1]) if trained.any() else -1
        untrained = np.flatnonzero(~trained[: last + 1])
        begin = int(untrained[-1]) + 1 if len(untrained) else 0
        conversation = draft.conversation
        spoke_last = (
            conversation is None or len(conversation.messages) - 1 in conversation.trained_message_indices
        )
        index = (len(tokens) if spoke_last else last + 1) - 1
        while index >= begin and self._is_blank(int(tokens[index])) and tokens[index] not in self._added_ids:
            index -= 1
        end = index if index >= begin and tokens[index] in self._added_ids else None
        while index >= begin and (tokens[index] in self._special_ids or self._is_blank(int(tokens[index]))):
            end = index if tokens[index] in self._special_ids else end
            index -= 1
        if end is not None:
            encoded.end_token_counts[int(tokens[end])] += 1
        if end is not None and trained[end]:
            encoded.num_stopping += 1
        elif not encoded.unstopped_example:
            decode = partial(bounded_tokenizer.decode, self._tokenizer)
            trained_end, rest = (
                decode(tokens[trained][-8:].tolist()),
                decode(tokens[last + 1 : last + 9].tolist()),
            )
            encoded.unstopped_example = f"{trained_end!r}" + (f", and then comes {rest!r}" if rest else "")


def _remove_images(document: Document) -> Document:
    """Return a document without the contents of its images, which the template does not need."""
    if document.conversation is None or not document.conversation.images:
        return document
    return replace(document, conversation=replace(document.conversation, images=()))


def build_template_notes(counts: Counter[str], unmatched_prompt: str) -> list[str]:
    """Build notes about unexpected effects of a template and about empty answers, one line each.

    Args:
        counts: Total counts over all records. See :class:`EncodedConversations`.
        unmatched_prompt: End of the generation prompt, if the template does not write this text
            before the answers in the training data. Empty if the template writes the complete
            prompt.

    Raises:
        UserError: If more than half of the records have reasoning, and the template drops all of
            it.
    """
    template_notes = []
    if unmatched_prompt:
        template_notes.append(
            f"the generation prompt ends in {unmatched_prompt!r}, which the template does not write "
            "before the answers of the data, so the model is trained without this text"
        )
    if counts["apart"]:
        template_notes.append(
            f"the template renders earlier answers differently from the last answer: {counts['apart']:,} "
            f"of {counts['records']:,} conversations became {counts['turns']:,} samples, one for each "
            "answer"
        )
    if counts["lost"]:
        template_notes.append(
            f"the template leaves out the reasoning of {counts['lost']:,} of {counts['thoughts']:,} "
            "answers with reasoning, so the model is trained without this reasoning"
        )
    if counts["lost"] and counts["lost"] == counts["thoughts"] and 2 * counts["think"] > counts["records"]:
        raise UserError(
            f"data.chat_template: the template leaves out all reasoning, but {counts['think']:,} of "
            f"{counts['records']:,} records contain reasoning; use a template that renders reasoning, or "
            "remove the reasoning from the records"
        )
    lines = [f"data.chat_template: {line}" for line in template_notes]
    if counts["empty"]:
        lines.append(
            f"data.source: {counts['empty']:,} answers are empty, so the model is trained to end its turn "
            "without text; remove these records, or set weight: 0 in these messages"
        )
    return lines


def _join_trained_text(text: str, encoding: Any, trained: npt.NDArray[np.bool_]) -> str:
    """Join the parts of a text whose tokens contribute to the loss, separated by line breaks.

    Args:
        text: The text.
        encoding: Encoding of the text.
        trained: Loss mask, bool ``[tokens]``.
    """
    if trained.all():
        return text
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False)).tolist()
    parts = []
    for first, stop in zip(edges[::2], edges[1::2], strict=True):
        parts.append(text[encoding.token_to_chars(first)[0] : encoding.token_to_chars(stop - 1)[1]])
    return "\n".join(parts)


def _find_token_at_char(encoding: Any, char: int) -> int:
    """Return the index of the token that contains a character.

    If no token contains it, returns the index of the next token. If there is no next token either,
    returns the number of tokens.
    """
    # No token contains this character, because tokenizers remove some characters, such as spaces.
    if (token_index := encoding.char_to_token(char)) is None:
        starts = ((index, span[0]) for index, span in enumerate(encoding.offsets))
        token_index = next((index for index, start in starts if start >= char), len(encoding.ids))
    return int(token_index)


def _find_token_after_char(encoding: Any, char: int, length: int) -> int:
    """Return the index of the first token that starts at or after a character.

    If no token starts there, the result is the number of tokens.

    Args:
        encoding: Encoding of a text.
        char: Index of the character in the text.
        length: Number of characters in the text.
    """
    if char >= length:
        return len(encoding.ids)
    token_index = _find_token_at_char(encoding, char)
    starts_earlier = token_index < len(encoding.ids) and encoding.token_to_chars(token_index)[0] < char
    return token_index + 1 if starts_earlier else token_index
