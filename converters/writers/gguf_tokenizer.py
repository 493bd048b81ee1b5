"""Convert the tokenizer, chat template, and end tokens for a GGUF file.

The tokenizer is only written if it is a byte-level BPE for which llama.cpp splits text exactly as
the original tokenizer does, as with GPT-2, Llama 3, and Qwen2. Otherwise, the file contains the
tokenizer model `no_vocab`, and llama.cpp only accepts and returns token IDs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from portable.converters.config_and_tokenizer_files import GENERATION_CONFIG_FILE
from portable.converters.storage.safe_open import read_json_object_or_empty, read_small_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

# Names of pre-tokenizers in llama.cpp, keyed by their regular expression in tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PRE_TOKENIZER_NAMES = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
_END_TOKEN_KINDS = ("eos", "eot", "eom")  # llama.cpp stops at one token of each kind


def add_tokenizer_to_writer(writer: Any, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Add the tokenizer and the chat template to a GGUF writer.

    The tokenizer model `no_vocab` is added instead of the tokenizer if `tokenizer.json` is missing
    or invalid, if its token IDs do not fit the config's `vocab_size`, or if llama.cpp may split
    text into other tokens than this tokenizer. In this case, a warning is logged, but the chat
    template is still added. A warning is also logged if there are more than three end tokens,
    because llama.cpp ignores the others.

    Args:
        writer: The `gguf.GGUFWriter`.
        checkpoint: Checkpoint with the tokenizer files.
        config: Content of the `config.json`.
    """
    path = checkpoint.companions.get("tokenizer.json")
    tokenizer, chat_template = read_json_object_or_empty(path), _read_chat_template(checkpoint)
    # A lone surrogate cannot be encoded as UTF-8.
    writer.add_chat_template(chat_template.encode("utf-8", "replace").decode())
    try:
        end_token_ids = _list_end_token_ids(checkpoint, config, tokenizer, chat_template)
        writer_values = convert_byte_level_bpe_to_gguf(tokenizer, config, end_token_ids)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):  # not a tokenizer.json
        writer_values = None
    if writer_values is None:
        reason = (
            "has no tokenizer.json"
            if path is None
            else "has a tokenizer that may split text differently in llama.cpp"
        )
        _log.warning(
            "warning: %s: %s; the GGUF file contains no tokenizer, so llama.cpp accepts only token IDs",
            checkpoint.root,
            reason,
        )
        writer.add_tokenizer_model("no_vocab")
        return
    if len(end_token_ids) > len(_END_TOKEN_KINDS):
        _log.warning(
            "warning: %s: llama.cpp supports only %d of the %d tokens that end generation, so generation "
            "may not stop at the other tokens",
            checkpoint.root,
            len(_END_TOKEN_KINDS),
            len(end_token_ids),
        )
    for key, value in writer_values.items():
        getattr(writer, f"add_{key}")(value)


def _read_chat_template(checkpoint: Checkpoint) -> str:
    """Read the chat template of a checkpoint, or return an empty string if it has none.

    The file `chat_template.jinja` has priority over `tokenizer_config.json`. If
    `tokenizer_config.json` contains several named templates, the template named `default` is
    returned.
    """
    path = checkpoint.companions.get("chat_template.jinja")
    if path is not None:
        return read_small_file(path).decode("utf-8", "replace")
    template = read_json_object_or_empty(checkpoint.companions.get("tokenizer_config.json")).get(
        "chat_template"
    )
    if isinstance(template, list):
        templates = {
            entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
        }
        template = templates.get("default")
    return template if isinstance(template, str) else ""


def _list_end_token_ids(
    checkpoint: Checkpoint, config: Mapping[str, Any], tokenizer: Mapping[str, Any], chat_template: str
) -> list[int]:
    """Return the IDs of the tokens that stop generation in transformers.

    The value of `eos_token_id` in `generation_config.json` has priority over the value in `config`.
    The IDs are sorted by importance, because llama.cpp only uses the first few. Tokens whose text
    occurs in the chat template come first. Among equal candidates, the tokenizer's `eos_token`
    comes first.
    """
    configured_ids = read_json_object_or_empty(checkpoint.companions.get(GENERATION_CONFIG_FILE)).get(
        "eos_token_id"
    )
    configured_ids = config.get("eos_token_id") if configured_ids is None else configured_ids
    texts = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", ())}
    eos_token = read_json_object_or_empty(checkpoint.companions.get("tokenizer_config.json")).get("eos_token")
    eos_token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    ids = [
        token_id
        for token_id in (configured_ids if isinstance(configured_ids, list) else [configured_ids])
        if type(token_id) is int
    ]
    order = {
        token_id: (texts.get(token_id, "\0") not in chat_template, texts.get(token_id) != eos_token)
        for token_id in ids
    }
    return sorted(order, key=lambda token_id: order[token_id])


def convert_byte_level_bpe_to_gguf(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], end_token_ids: list[int]
) -> dict[str, Any] | None:
    """Convert a `tokenizer.json` to the tokenizer metadata of a GGUF file.

    Args:
        tokenizer: Content of the `tokenizer.json`.
        config: Content of the `config.json`.
        end_token_ids: IDs of the tokens that end a text or a turn. Only the first three are used.

    Returns:
        The metadata values. The value with the key `<key>` is written by the method
        `GGUFWriter.add_<key>`. None if the tokenizer is not a byte-level BPE that llama.cpp
        supports, or if its vocabulary does not match the config.

    Raises:
        AttributeError, KeyError, TypeError, ValueError, IndexError: If `tokenizer` does not have
            the structure of a `tokenizer.json`.
    """
    model, pre_tokenizer_name = (
        tokenizer.get("model"),
        _find_pre_tokenizer_name(tokenizer.get("pre_tokenizer")),
    )
    if not isinstance(model, dict) or model.get("type") != "BPE" or pre_tokenizer_name is None:
        return None
    if (normalizer := tokenizer.get("normalizer")) and (
        pre_tokenizer_name != "qwen2" or normalizer.get("type") != "NFC"
    ):
        return None
    if bool(model.get("ignore_merges")) != (pre_tokenizer_name == "llama-bpe") or model.get("byte_fallback"):
        return None
    added = {token["id"]: token for token in tokenizer.get("added_tokens", ())}
    vocab = {number: text for text, number in model.get("vocab", {}).items()}
    vocab |= {number: token["content"] for number, token in added.items()}
    count = config.get("vocab_size")
    if type(count) is not int or not vocab or max(vocab) >= count:
        return None
    adds_bos = _detect_added_bos(tokenizer.get("post_processor"), vocab, config)
    if adds_bos is None:
        return None
    from gguf import TokenType  # not at the top, because the import is slow

    kinds = [
        (TokenType.CONTROL if added[i].get("special") else TokenType.USER_DEFINED)
        if i in added
        else TokenType.NORMAL
        if i in vocab
        else TokenType.UNUSED
        for i in range(count)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    tokens = [
        *((key, config.get(f"{key}_token_id")) for key in ("bos", "pad")),
        *zip(_END_TOKEN_KINDS, end_token_ids, strict=False),
    ]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre_tokenizer_name,
        "token_list": [vocab.get(i, f"[PAD{i}]").encode("utf-8", "surrogatepass") for i in range(count)],
        "token_types": kinds,
        # The list must not be empty. This pair never occurs, because its halves are not single characters.
        "token_merges": [merge.encode("utf-8", "surrogatepass") for merge in merges or ["<none> <none>"]],
        **{
            f"{key}_token_id": token_id
            for key, token_id in tokens
            if type(token_id) is int and 0 <= token_id < count
        },
        "add_bos_token": adds_bos,
    }


def _find_pre_tokenizer_name(pre_tokenizer: Any) -> str | None:
    """Find llama.cpp's name for a pre-tokenizer.

    Args:
        pre_tokenizer: Value of `pre_tokenizer` in the `tokenizer.json`.

    Returns:
        `"gpt-2"`, `"llama-bpe"`, or `"qwen2"`. None for any other pre-tokenizer.
    """
    if not isinstance(pre_tokenizer, dict):
        return None
    if pre_tokenizer.get("type") == "ByteLevel":
        plain = not pre_tokenizer.get("add_prefix_space") and pre_tokenizer.get("use_regex", True)
        return "gpt-2" if plain else None
    inner = pre_tokenizer.get("pretokenizers")
    if pre_tokenizer.get("type") != "Sequence" or not isinstance(inner, list) or len(inner) != 2:
        return None
    first, second = inner
    pattern = first.get("pattern", {}).get("Regex") if first.get("type") == "Split" else None
    plain = second.get("type") == "ByteLevel" and second.get("use_regex") is False
    isolated = first.get("behavior") == "Isolated" and not first.get("invert")
    return (
        _PRE_TOKENIZER_NAMES.get(str(pattern))
        if plain and isolated and not second.get("add_prefix_space")
        else None
    )


def _detect_added_bos(
    post_processor: Any, vocab: Mapping[int, str], config: Mapping[str, Any]
) -> bool | None:
    """Detect whether the tokenizer adds the BOS token at the beginning of each text.

    Args:
        post_processor: Value of `post_processor` in the `tokenizer.json`.
        vocab: Text of each token, keyed by token ID.
        config: Content of the `config.json`.

    Returns:
        Whether the tokenizer adds the BOS token. None if it adds other special tokens, or if llama.cpp
        does not support its type of post-processor.
    """
    if post_processor is None or post_processor.get("type") == "ByteLevel":
        return False
    steps = (
        post_processor.get("processors", []) if post_processor.get("type") == "Sequence" else [post_processor]
    )
    steps = [part for part in steps if part.get("type") != "ByteLevel"]
    if not steps:
        return False
    if len(steps) != 1 or steps[0].get("type") != "TemplateProcessing":
        return None
    single = steps[0].get("single", [])
    tokens = [part["SpecialToken"]["id"] for part in single if "SpecialToken" in part]
    if not tokens:
        return False
    begins = single and "SpecialToken" in single[0] and len(tokens) == 1
    bos = config.get("bos_token_id")
    return True if begins and isinstance(bos, int) and vocab.get(bos) == tokens[0] else None
