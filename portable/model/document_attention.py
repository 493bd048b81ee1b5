"""Restrict attention to the documents of a packed sample.

Packed samples have two extra columns: ``position_ids``, which begin at 0 in each document, and
``document_lengths`` (:class:`portable.data.samples.packing.PackedDocumentSamples`). This module
uses them to make every layer attend as if each document were a separate sequence. There are three
implementations:

* Masks: transformers builds the mask of each layer type (causal, sliding window, chunked) with a
  function that decides whether a query position may attend to a key position. This module wraps the
  function. The wrapper passes positions within the document, and rejects pairs of positions from
  different documents. The mask has a fixed shape and is built without reading values of tensors, so
  this works on every device, compiled or not.
* One call per document: on a CPU, the fused sdpa kernel also computes the masked elements. It is
  therefore called once per document, which costs less than causal attention over the sample.
* Document lengths: flash attention, from a package or the Hub, receives the lengths of the
  documents and separates them itself.

:mod:`portable.model.document_states` does the same for layers that carry a state along the
sequence. Some models mix tokens in other ways, or compute positions themselves. Such models cannot
keep documents separate, and :func:`check_document_separation` rejects them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from portable.batch import PART_POSITIONS_COLUMN, TEXT_TOKENS_COLUMN
from portable.config.derived_defaults import compute_derived_defaults
from portable.errors import UserError
from portable.model.document_states import STATE_SEPARATING_TYPES
from portable.model.forward import ForwardWrapper
from portable.model.layers import run_trial_forward
from portable.private import torch_internals
from portable.private.transformers_internals import (
    get_attention_kernel,
    get_mask_functions,
    ignore_packed_sequences,
    wrap_mask_function,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.config import RunConfig
    from portable.model.forward import Model


_COMPARED = """
afmoe apertus arcee aria aria_text axk1 axk2 aya_vision beam bert bert-generation big_bird biogpt bitnet
bloom codegen cohere cohere2 cohere2_moe cohere2_vision cohere_compass cohere_compass_text cosmos3_omni
ctrl cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl deepseek_vl_hybrid diffllama doge dots1
dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe evolla exaone4 exaone_moe falcon flex_olmo flint
fuyu gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4
glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe glm_moe_dsa glmasr got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo
gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_speech granite_speech_plus granite_swa granitemoe
granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
hyperclovax_vision_v2 idefics2 idefics3 internlm3 internvl iquestcoder jais2 janus jetmoe kimi_k25
kolibri1 laguna lfm2 lfm2_vl lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video
llava_onevision longcat_flash megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl
minimax_m3_vl_text ministral ministral3 mistral mistral3 mistral4 mixtral mllama modernbert-decoder moshi
moss_transcribe_diarize mpt muse_glimmer nanochat nemotron olmo olmo2 olmo3 olmoe omniasr opt ovis2
persimmon phi phi3 phi4_multimodal phimoe pp_chart2table qianfan_ocr qwen2 qwen2_5_omni_thinker qwen2_5_vl
qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
rembert roc_bert roformer seed_oss shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 vaultgemma
video_llama_3 video_llava vipllava voxtral whisper xglm youtu
"""

DOCUMENT_SEPARATING_TYPES = frozenset(_COMPARED.split())
"""Model types for which a test has shown that packed documents have the same loss and gradients as documents
in separate samples.
"""

DOCUMENT_SEPARATING_TEXT_TYPES = frozenset(
    {
        "emu3_text_model",
        "glm4v_moe_text",
        "glm4v_text",
        "mllama_text_model",
        "muse_glimmer_text",
        "qwen2_5_omni_text",
        "qwen2_5_vl_text",
        "qwen2_vl_text",
        "qwen3_omni_moe_text",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
    }
)
"""Model types of the text configs of composite models in :data:`DOCUMENT_SEPARATING_TYPES`."""

MASK_READING_TYPES = ("axk2", "deepseek_v32", "doge", "dots3_note_text", "falcon", "glm_moe_dsa")
"""Types in :data:`DOCUMENT_SEPARATING_TYPES` whose layers read the attention mask, so that it must be a
tensor. For these types, attention cannot run once per document.
"""

_MASKED_KERNELS = ("sdpa", "eager", "flex_attention")
"""Kernels that accept the masks of this module. Other kernels must accept lengths, like flash attention."""
DOCUMENT_SEPARATING_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "moe", "mlp"}
)
"""Layer types of transformers that mix tokens only by masked attention, or do not mix tokens."""
STATEFUL_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Layer types of transformers that carry a state along a sequence."""
LAYERS_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "moe", "mlp"})
"""Layer types of transformers that do not attend to tokens, so they need no mask."""
UNTESTED_LAYERS = frozenset(
    {
        "window_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "minimax_m3_sparse",
        "reference_sliding_attention",
    }
)
"""Layer types of transformers that no test covers yet."""


IMAGE_PACKING_TYPES = frozenset(
    {
        "aya_vision",
        "glm4v",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)
"""Model types for which a test has shown that packed conversations with images have the same loss and
gradients as conversations in separate samples.
"""


def can_separate_states(config: RunConfig) -> bool:
    """Return whether stateful layers can run on one document at a time.

    Returns False for XLA and TPUs, which would have to compile every combination of lengths, and for
    context parallelism, because a rank has only parts of documents.
    """
    return config.backend not in ("xla", "tpu") and config.context_parallel_size == 1


def check_document_separation(
    model: PreTrainedModel,
    key: str = "data.packing",
    *,
    seq_len: int = 0,
    separates_states: bool = True,
) -> None:
    """Check that the documents of a packed sample do not influence each other.

    Args:
        model: Model on the meta device. A trial forward pass on a copy shows whether its attention
            masks are causal.
        key: Setting that requires separate documents, used in error messages.
        seq_len: Number of tokens in a sample.
        separates_states: Whether layers with a recurrent state, such as Mamba layers, can run on
            one document at a time. This is the result of :func:`can_separate_states`.

    Raises:
        UserError: If attention or a recurrent state may cross document boundaries. This is assumed
            if the attention kernel does not support packed documents, if
            :func:`explain_document_mixing` returns a reason, such as an untested model type, or if
            the attention masks are not causal.
    """
    config = model.config
    kernel = get_attention_kernel(config)
    if kernel not in _MASKED_KERNELS and (
        _find_mask_function(kernel) is not _find_mask_function("flash_attention_2") or "flash" not in kernel
    ):
        raise UserError(
            f"{key}: the attention kernel {kernel} does not separate packed texts; set model.attention to "
            "sdpa"
        )
    remedy = "set data.packing to true or false" if key == "data.packing" else f"set {key} to 1"
    reason = explain_document_mixing(config, seq_len, separates_states=separates_states)
    if reason is not None:
        raise UserError(f"{key}: {type(model).__name__} {reason}; {remedy}")
    if _has_attention(config) and not _makes_only_causal_masks(model):
        raise UserError(
            f"{key}: {type(model).__name__} attends in both directions; set is_decoder: true in the config "
            f"of the model, or {remedy}"
        )


def explain_document_mixing(
    config: PretrainedConfig, seq_len: int = 0, *, separates_states: bool = True
) -> str | None:
    """Explain why a model might not keep the documents of a packed sample separate.

    Args:
        config: Transformers config of the model.
        seq_len: Number of tokens of a sample. Used only for models that scale attention by the
            position.
        separates_states: Whether stateful layers can run on one document at a time, as returned by
            :func:`can_separate_states`.

    Returns:
        The reason, to be written after the name of the model, such as ``has not been tested to keep
        packed texts separate``. None if a test has shown that the model type keeps documents
        separate.
    """
    text: Any = config.get_text_config()
    types = {config.model_type, text.model_type}
    separating_types = DOCUMENT_SEPARATING_TYPES
    if separates_states:
        separating_types |= STATE_SEPARATING_TYPES
    layers = getattr(text, "layer_types", None) or ()
    unproven_layers = [layer for layer in layers if layer not in DOCUMENT_SEPARATING_LAYERS]
    stateful = next((layer for layer in unproven_layers if layer in STATEFUL_LAYERS), None)
    if stateful and not (separates_states and types <= STATE_SEPARATING_TYPES):
        return f"has layers of type {stateful}, which carry a state from one text to the next"
    if other := next((layer for layer in unproven_layers if layer not in STATEFUL_LAYERS), None):
        return f"has layers of type {other}, which have not been tested to keep packed texts separate"
    if getattr(text, "attn_temperature_tuning", False) and seq_len >= text.floor_scale:
        return (
            "scales attention by the position in the packed sample (attn_temperature_tuning) from position "
            f"{text.floor_scale} on"
        )
    text_type = text.model_type  # a composite model may have a text config of any type
    if (
        config.model_type not in separating_types
        or text_type not in separating_types | DOCUMENT_SEPARATING_TEXT_TYPES
    ):
        return "has not been tested to keep packed texts separate"
    return None


def apply_default_packing(config: RunConfig) -> RunConfig:
    """Disable the default packing of conversations if the model might mix the documents of a packed sample.

    The default of ``data.packing`` for conversations is ``documents``. A value that the user has set
    does not change.

    Args:
        config: The config of the run.

    Returns:
        A config with ``data.packing: false``, or ``config`` itself if nothing changes. If the model
        config cannot be loaded, ``config`` is returned, because building the model reports the error
        later.
    """
    if config.data.packing != "documents" or config.is_set("data.packing"):
        return config
    from portable.model.build import load_model_config

    try:
        reason = _explain_mixing_in_run(load_model_config(config.model), config)
    except UserError:  # building the model reports the error
        return config
    return config if reason is None else config.replaced({"data.packing": False})


def explain_image_mixing(model_type: str) -> str | None:
    """Explain why packing conversations with images might change the results of a model.

    Returns:
        The reason, as a verb phrase. None if a test has shown that packing does not change the results.
    """
    if model_type in IMAGE_PACKING_TYPES:
        return None
    return "has not been tested to keep packed texts with images separate"


def build_packing_notes(config: RunConfig, model: PreTrainedModel) -> list[str]:
    """Build the note that explains why :func:`apply_default_packing` has disabled packing.

    Args:
        config: The config of the run, after :func:`apply_default_packing`.
        model: The model.

    Returns:
        A list with one note. Empty if the user has set ``data.packing``, or if its default is unchanged.
    """
    default = compute_derived_defaults(config).get("data.packing")  # missing if the user has set the value
    if config.data.packing is not False or default != "documents":
        return []
    reason = _explain_mixing_in_run(model.config, config)
    if reason is None:
        return []
    if config.data.images:
        return [f"data.packing is false, because {type(model).__name__} {reason}"]
    return [
        f"data.packing is false, because {type(model).__name__} {reason}; set data.packing: true to pack "
        "texts without separating them"
    ]


def _explain_mixing_in_run(model_config: PretrainedConfig, config: RunConfig) -> str | None:
    """Explain why documents in packed samples might influence each other, or return None if they cannot."""
    reason = explain_document_mixing(
        model_config, config.data.seq_len, separates_states=can_separate_states(config)
    )
    if reason is None and config.data.images:
        return explain_image_mixing(model_config.model_type)
    return reason


def _has_attention(config: PretrainedConfig) -> bool:
    """Return whether a model has attention layers, according to ``layer_types`` in its config.

    The result is True if the config has no ``layer_types``.
    """
    layers = getattr(config.get_text_config(), "layer_types", None)
    return not layers or not LAYERS_WITHOUT_ATTENTION.issuperset(layers)


def _find_mask_function(kernel: str) -> Any:
    """Return transformers' mask function for an attention kernel, or None for an unknown kernel."""
    return get_mask_functions().get(kernel, None)


_DIRECTION_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_decoder": ((False,), "true"),
    "use_bidirectional_attention": ((True, "all"), "false"),
    "causal": ((False,), "true"),  # XLM
    "attn_type": (("bi",), "uni"),  # XLNet
}
"""Settings of the text config that can select bidirectional attention. Each is mapped to a pair: the
values that make attention bidirectional, and the text of a value that makes it causal."""
_BIDIRECTIONAL_TYPES = ("cpmant",)
"""Model types whose attention is always bidirectional."""


def check_causal_attention(model: PreTrainedModel, key: str = "model") -> None:
    """Check that the attention of a causal language model is not bidirectional.

    Otherwise, each token would attend to its label, which is the next token. The check reads the
    settings in :data:`_DIRECTION_SETTINGS` from the text config, and rejects the model types in
    :data:`_BIDIRECTIONAL_TYPES`. The setting ``is_decoder: false`` is accepted if all masks of a
    trial forward pass are causal.

    Args:
        model: The model, on the meta device.
        key: Setting that specifies the model, used in error messages.

    Raises:
        UserError: If a setting or the model type makes the attention bidirectional.
    """
    text: Any = model.config.get_text_config()
    name = type(model).__name__
    for setting, (values, causal) in _DIRECTION_SETTINGS.items():
        value = getattr(text, setting, None)
        if not any(
            value is bidirectional_value or (value == bidirectional_value and value)
            for bidirectional_value in values
        ):
            continue
        if setting == "is_decoder" and _makes_only_causal_masks(model):
            continue  # for example GPT-NeoX, which is always causal
        path = "model.config" if key == "model" else "its config.json"
        path = path if text is model.config else f"text_config in {path}"
        shown = str(value).lower()
        raise UserError(
            f"{key}: {name} attends in both directions ({setting}: {shown}), so each token sees its own "
            f"label; set {setting}: {causal} in {path}, or choose another model.task"
        )
    if model.config.model_type in _BIDIRECTIONAL_TYPES:
        raise UserError(
            f"{key}: {name} attends in both directions, so each token sees its own label; choose another "
            "model"
        )


def _makes_only_causal_masks(model: PreTrainedModel) -> bool:
    """Return whether every attention mask that a model creates in a trial forward pass is causal.

    Returns False if the forward pass creates no mask. Errors in the forward pass are ignored.

    Args:
        model: The model, on the meta device. The forward pass runs on a copy.
    """
    causal: list[bool] = []

    def wrap_mask_maker(make_mask: Callable[..., Tensor]) -> Callable[..., Any]:
        def make_recorded_mask(**mask_arguments: Any) -> Tensor:
            causal.append(BIDIRECTIONAL_ARGUMENT not in mask_arguments)
            return make_mask(**mask_arguments)

        return make_recorded_mask

    # Ignore exceptions, because masks are created before the layers run, and some layers cannot run on the
    # meta device.
    with wrap_mask_function(wrap_mask_maker, get_attention_kernel(model.config)), suppress(Exception):
        run_trial_forward(model)
    return bool(causal) and all(causal)


class DocumentForward(ForwardWrapper):
    """Forward method that accepts packed documents, and prevents attention between them.

    Args:
        model: A transformers model, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        config: Any = model.config
        self._kernel = get_attention_kernel(config)
        types = (config.model_type, config.get_text_config().model_type)
        self._reads_mask = any(model_type in MASK_READING_TYPES for model_type in types)
        self._model = model

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the wrapped forward pass without attention between packed documents.

        Samples without ``position_ids`` are not packed, and their attention does not change. For
        packed samples, there are three cases:

        * Flash attention receives the document boundaries, computed from ``document_lengths``.
        * With sdpa on a CPU, attention runs once per document, with the lengths in
          ``document_lengths``. This does not apply if the layers read the mask themselves or if the
          model is compiled.
        * In all other cases, and without ``document_lengths``, a mask separates the documents.

        Args:
            arguments: Positional arguments of the model.
            inputs: Columns of a batch. Packed samples have ``position_ids``, which begin at 0 in
                each document, and usually ``document_lengths``. With context parallelism, both
                cover the tokens of all ranks, and the model receives the column
                :data:`PART_POSITIONS_COLUMN` as its ``position_ids``. Columns that the model does
                not accept are removed.

        Returns:
            The output of the model.
        """
        positions = inputs.get("position_ids")
        inputs.pop(TEXT_TOKENS_COLUMN, None)
        lengths = inputs.pop("document_lengths", None)
        if PART_POSITIONS_COLUMN in inputs:
            # `positions` covers the tokens of all context-parallel ranks, but this column covers only this
            # rank.
            inputs["position_ids"] = inputs.pop(PART_POSITIONS_COLUMN)
        if positions is None:
            return self.__wrapped__(*arguments, **inputs)
        # Otherwise transformers would read the positions on the host to find out whether documents are
        # packed.
        with ignore_packed_sequences():
            if "flash" in self._kernel and lengths is not None:
                return self.__wrapped__(
                    *arguments, **inputs, **_build_flash_arguments(lengths, positions.shape[1])
                )
            document_lengths = None
            if lengths is not None and self._attends_per_document(lengths.device):
                register_document_sdpa()
                document_lengths = [[length for length in row if length] for row in lengths.tolist()]
            with wrap_mask_function(_build_document_mask_wrapper(positions, document_lengths), self._kernel):
                return self.__wrapped__(*arguments, **inputs)

    def _attends_per_document(self, device: torch.device) -> bool:
        """Return whether attention is computed separately for each document.

        This is the case for sdpa on a CPU, unless the layers read the mask themselves or a module
        of the model is compiled. In all other cases, attention runs once on the packed sample.
        """
        if self._kernel != "sdpa" or self._reads_mask or device.type != "cpu":
            return False
        return all(torch_internals.get_compiled_call(module) is None for module in self._model.modules())


def install_document_forward(model: Model) -> Model:
    """Make the model's forward method accept packed documents. See :class:`DocumentForward`.

    Args:
        model: A transformers model, not wrapped, that has passed :func:`check_document_separation`.

    Returns:
        The same model.
    """
    return DocumentForward.install(model)


BIDIRECTIONAL_ARGUMENT = "allow_is_bidirectional_skip"
"""Keyword argument that transformers passes to mask functions only if the mask is bidirectional."""


@dataclass(frozen=True)
class DocumentMaskFunction:
    """Mask function for transformers that prevents attention between the documents of a sample.

    Attributes:
        single_document_mask: Mask function for a single document, such as a causal or sliding-window
            mask. It takes the arguments of :meth:`__call__`, but with positions within the document.
        positions: Position of each token in its document, int64 ``[batch, tokens]``.
        document_numbers: Document index of each token, int64 ``[batch, tokens]``.
    """

    single_document_mask: Callable[..., Tensor]
    positions: Tensor
    document_numbers: Tensor

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        """Return whether a query token may attend to a key token.

        The arguments are index tensors that can be broadcast together.

        Args:
            batch: Index of the sample.
            head: Index of the attention head.
            query: Index of the query token in the sample.
            key: Index of the key token in the sample.

        Returns:
            Boolean tensor with the broadcast shape of the arguments.
        """
        is_visible = self.single_document_mask(
            batch, head, self.positions[batch, query], self.positions[batch, key]
        )
        return is_visible & (self.document_numbers[batch, query] == self.document_numbers[batch, key])


def _build_document_mask_wrapper(
    positions: Tensor, document_lengths: list[list[int]] | None
) -> Callable[[Callable[..., Tensor]], Callable[..., Any]]:
    """Build a decorator that makes transformers' mask functions separate the documents of a sample.

    Bidirectional masks, such as masks of an image encoder, do not change.

    Args:
        positions: Positions of the tokens in their documents, int64 ``[batch, tokens]``.
        document_lengths: Lengths of the documents of each sample. If given, masks are replaced
            by a :class:`_PerDocumentMask`, except masks with a custom mask function of the
            model (``use_vmap``), which remain tensors. None if all masks must be tensors.

    Returns:
        Decorator that replaces a function that creates a mask.
    """
    documents = (positions == 0).cumsum(-1)

    def wrap_mask_maker(make_mask: Callable[..., Tensor]) -> Callable[..., Any]:
        def make_document_mask(*, mask_function: Callable[..., Tensor], **mask_arguments: Any) -> Any:
            if BIDIRECTIONAL_ARGUMENT in mask_arguments:  # a mask of another sequence, such as an image
                return make_mask(mask_function=mask_function, **mask_arguments)
            # Do not use the per-document mask with `use_vmap`: transformers sets it for a model's custom mask
            # functions, which need a tensor.
            if document_lengths is not None and not mask_arguments["use_vmap"]:
                return _PerDocumentMask(
                    document_lengths, mask_function, mask_arguments.get("local_size"), make_mask
                )
            separated = DocumentMaskFunction(mask_function, positions, documents)
            return make_mask(**{**mask_arguments, "mask_function": separated, "allow_is_causal_skip": False})

        return make_document_mask

    return wrap_mask_maker


def _build_flash_arguments(lengths: Tensor, seq_len: int) -> dict[str, Any]:
    """Return the keyword arguments for flash attention over sequences of different lengths.

    Shapes and integer arguments are the same for all batches, so that they cause no sync and no
    recompilation. Therefore, the maximum length is always the sequence length of the run.

    Args:
        lengths: Lengths of the documents, int64 ``[batch, documents]``. Unused entries are 0, which the
            kernel treats as empty sequences.
        seq_len: Number of tokens of a sample.
    """
    ends = functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": seq_len, "max_length_k": seq_len}


class _PerDocumentMask:
    """Placeholder for a mask tensor. It makes sdpa run once per document.

    :func:`register_document_sdpa` makes sdpa accept this object.

    Args:
        document_lengths: Lengths of the documents of each sample.
        mask_function: Mask function for a single document.
        local_size: Size of the sliding window or chunk. None if attention is causal without such a
            limit. Documents up to this length need only a causal mask, which sdpa applies without a
            tensor.
        make_mask: Function of transformers that creates a mask tensor from a mask function.
    """

    def __init__(
        self,
        document_lengths: list[list[int]],
        mask_function: Callable[..., Tensor],
        local_size: int | None,
        make_mask: Callable[..., Tensor],
    ) -> None:
        self._document_lengths = document_lengths
        self._mask_function = mask_function
        self._local_size = local_size
        self._make_mask = make_mask
        self._masks: dict[int, Tensor | None] = {}

    def attend_per_document(
        self,
        attention: Callable[..., tuple[Tensor, None]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **keywords: Any,
    ) -> Tensor:
        """Call an attention function once for each document and concatenate the results.

        Args:
            attention: The sdpa function of transformers, which returns the output and None.
            module: Attention module, passed to ``attention``.
            query: Queries of the batch, ``[batch, heads, tokens, head size]``.
            key: Keys of the batch, with the same layout.
            value: Values of the batch, with the same layout.
            keywords: Further arguments of ``attention``.

        Returns:
            The output, ``[batch, tokens, heads, head size]``.
        """
        rows = []
        # Use split, because its gradients are concatenated. Gradients of slices would be padded and added.
        for lengths, *row in zip(
            self._document_lengths, query.split(1), key.split(1), value.split(1), strict=True
        ):
            parts = zip(*(tensor.split(lengths, dim=2) for tensor in row), strict=True)
            results = [
                attention(module, *part, self._build_document_mask(part[0]), **keywords)[0] for part in parts
            ]
            rows.append(torch.cat(results, dim=1))
        return torch.cat(rows)

    def _build_document_mask(self, query: Tensor) -> Tensor | None:
        """Build the mask tensor of a single document. Masks are cached by document length.

        Args:
            query: Queries of the document, ``[1, heads, tokens, head size]``. Only the length and the
                device are used.

        Returns:
            The mask. None if it is a plain causal mask, which sdpa applies without a tensor.
        """
        length = query.shape[2]
        if self._local_size is None or length <= self._local_size:
            return None
        if length not in self._masks:
            self._masks[length] = self._make_mask(
                batch_size=1,
                q_length=length,
                kv_length=length,
                mask_function=self._mask_function,
                allow_is_causal_skip=False,
                device=query.device,
            )
        return self._masks[length]


@cache  # once per process, because recomputed layers run outside of any context
def register_document_sdpa() -> None:
    """Replace transformers' ``sdpa`` with a function that accepts :class:`_PerDocumentMask`.

    The replacement is global: all models in the process use it. For an ordinary mask, it calls the
    original function. Only the first call of :func:`register_document_sdpa` has an effect.
    """
    from transformers import AttentionInterface

    attention = AttentionInterface()["sdpa"]

    def attend_with_documents(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> tuple[Tensor, None]:
        if isinstance(attention_mask, _PerDocumentMask):
            return attention_mask.attend_per_document(attention, module, query, key, value, **keywords), None
        result: tuple[Tensor, None] = attention(module, query, key, value, attention_mask, **keywords)
        return result

    AttentionInterface.register("sdpa", attend_with_documents)
