"""Transformers models: built on the meta device, initialised or loaded unit by unit.

Nothing here holds a whole model in memory: parameters are created on the meta device, a backend shards and
allocates them, and the values then arrive one transformer layer, or one tensor, at a time.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from portable.errors import UserError, one_line
from portable.model.transformers_patches import no_look_at_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from transformers import PretrainedConfig, PreTrainedModel

    from portable.config import ModelConfig, RunConfig

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
}


def model_config(settings: ModelConfig) -> PretrainedConfig:
    """The transformers config that ``model.config`` or ``model.name_or_path`` describes.

    Raises:
        UserError: for an unknown ``model_type``, a key that its config class does not know, or a name that
            can be found neither as a folder nor on the hub.
    """
    from transformers import AutoConfig

    if settings.name_or_path is None:
        given = dict(settings.config or {})
        model_type = given.pop("model_type", None)
        if not isinstance(model_type, str):
            raise UserError("model.config.model_type: missing; name a transformers model type such as llama")
        try:
            known = AutoConfig.for_model(model_type)
        except ValueError as error:
            near = _nearest(model_type, _model_types())
            raise UserError(f"model.config.model_type: transformers knows no {model_type!r}{near}") from error
        except Exception as error:  # its defaults contradict each other
            raise UserError(f"model.config: {model_type}: {one_line(error)}") from error
        for key in given:
            # transformers keeps any keyword it is given, so that a misspelt one would change nothing.
            if not (_has_setting(known, key) or _means_nothing(key, given[key]) or _is_of_generation(key)):
                near = _nearest(key, known.to_dict())
                raise UserError(f"model.config.{key}: not a setting of {type(known).__name__}{near}")
        try:
            config = AutoConfig.for_model(model_type, **given)
        except Exception as error:
            raise UserError(f"model.config: {one_line(error)}") from error
    else:
        name = settings.name_or_path
        if (name.startswith(("/", ".")) or name.count("/") > 1) and not Path(name).is_dir():
            raise UserError(
                f"model.name_or_path: {name}: no such folder; give a model's folder, or its name on the hub "
                "(organisation/name)"
            )
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=settings.trust_remote_code)
        except Exception as error:  # sizes that contradict each other have an error class of their own
            raise UserError(f"model.name_or_path: {one_line(error)}") from error
    place = "model.config" if settings.name_or_path is None else "model.name_or_path"
    try:
        config.get_text_config()
    except ValueError as error:  # it describes several models of text
        raise UserError(f"{place}: {one_line(error)}") from error
    if settings.task == "seq2seq-lm" and not getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"model.task: seq2seq-lm needs an encoder and a decoder, and {config.model_type} is not such a "
            "model; use causal-lm"
        )
    without_quantization(config)  # the weights are floats once they are loaded, and when they are saved
    return config


# Keys of config.json files on the hub that no class of today has an attribute for; they change nothing.
_PUBLISHED = {"auto_map", "n_ctx", "n_positions", "output_past", "prefix", "task_specific_params"}


def _has_setting(config: PretrainedConfig, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # what may differ from layer to layer is refused to whoever asks for one value
        return True


def _means_nothing(key: str, value: Any) -> bool:
    return key in _PUBLISHED or (key == "gradient_checkpointing" and not value)


def _is_of_generation(key: str) -> bool:
    """Whether ``key`` is of generation's settings, which config.json files had before these got their own."""
    from transformers import GenerationConfig

    return not key.startswith("_") and key in vars(GenerationConfig())


def without_quantization(config: PretrainedConfig) -> Any:
    """Take the description of quantised weights out of ``config``, where weights are floats; returns it."""
    description = None
    for part in (config, config.get_text_config(), config.get_text_config(decoder=True)):
        if "quantization_config" in vars(part):
            description = description or part.quantization_config
            del part.quantization_config
    return description


def build_model(config: PretrainedConfig, settings: ModelConfig) -> PreTrainedModel:
    """The model with fp32 parameters on the meta device and real (small) buffers; tied weights are tied.

    An architecture that has no ``sdpa`` gets ``eager``, unless ``model.attention`` asks for ``sdpa`` itself.

    Raises:
        UserError: for a config of which no model can be built, or none that computes anything.
    """
    place = "model.config" if settings.name_or_path is None else "model.name_or_path"
    text = config.get_text_config()
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        size = getattr(text, key, None)
        if isinstance(size, int) and size < 1:
            raise UserError(f"{place}: {key} is {size}; it must be at least 1")
    try:
        model = _from_config(config, settings, settings.attention)
    except Exception as error:  # anything may come out of a size or a name that does not fit
        lacks_sdpa = settings.attention == "sdpa" and "scaled_dot_product_attention" in str(error)
        if not lacks_sdpa:
            raise UserError(_unbuildable(config, place, error)) from error
        if "attention" in settings.model_fields_set:
            architecture = str(error).split()[0]
            raise UserError(f"model.attention: {architecture} has no sdpa kernel; use eager") from error
        try:
            model = _from_config(config, settings, "eager")
        except Exception as second:
            raise UserError(_unbuildable(config, place, second)) from second
    model.tie_weights()
    _prepare_for_training(model)
    if settings.attention != "flash_attention_2":  # which computes nothing on the meta device
        _check_forward(model, place)
    return model


def _prepare_for_training(model: PreTrainedModel) -> None:
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Keys and values of past tokens are of no use. Encoders and decoders have configs of their own.
            module.config.use_cache = False
            # It looks for padding in every batch, to warn of a missing mask: on an accelerator that waits for
            # the device. The data comes with a mask wherever it is padded.
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _no_warning


def _no_warning(*_: Any) -> None:
    pass


def _from_config(config: PretrainedConfig, settings: ModelConfig, attention: str) -> PreTrainedModel:
    import transformers
    from accelerate import init_empty_weights

    auto_class = getattr(transformers, AUTO_CLASSES[settings.task])
    config = copy.deepcopy(config)  # what is saved with the weights stays as it was given
    text = config.get_text_config()
    vocabulary, padding = getattr(text, "vocab_size", None), getattr(text, "pad_token_id", None)
    given = settings.name_or_path is not None or "pad_token_id" in (settings.config or {})
    if not given and isinstance(vocabulary, int) and isinstance(padding, int) and padding >= vocabulary:
        text.pad_token_id = None  # a default, of a larger vocabulary; the tokenizer brings another
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class.from_config(
            config,
            attn_implementation=attention,
            dtype=torch.float32,
            trust_remote_code=settings.trust_remote_code,
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:  # made like a parameter; its value is not from there
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return model


def _unbuildable(config: PretrainedConfig, place: str, error: Exception) -> str:
    """What is wrong with a config, as far as the error of building its model tells."""
    if isinstance(error, ImportError):
        return f"model: {one_line(error)}"
    if isinstance(error, KeyError) and error.args:
        values = config.get_text_config().to_dict()
        keys = [key for key, value in values.items() if isinstance(value, str) and value == error.args[0]]
        if keys:
            return (
                f"{place}: {keys[0]} is {error.args[0]!r}, which transformers does not know; choose another"
            )
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{place}: no model can be built of it ({kind}{one_line(error)}); check its sizes and names"


# How torch says that two sizes do not go together. Whatever else goes wrong on the meta device, such as code
# that looks at values, says nothing about the config.
_SHAPES_DISAGREE = re.compile(r"must match|cannot be multiplied|is invalid for input of size|Expected size")


def _check_forward(model: PreTrainedModel, place: str) -> None:
    """Raise UserError if the sizes in the config contradict each other; costs no memory and no arithmetic."""
    one_of_each = {names[0] for names in layer_kinds(model).values()}
    try:
        trial_forward(shortened(model, one_of_each))
    except Exception as error:
        if isinstance(error, RuntimeError) and _SHAPES_DISAGREE.search(str(error)):
            raise UserError(
                f"{place}: its sizes do not fit each other ({one_line(error)}); check the numbers of heads "
                "and the sizes they divide"
            ) from error


def called_past_hooks(model: nn.Module) -> set[str]:
    """Names of layers that work without telling what hooks into them.

    Their ``forward`` is called directly, as far as a pass on the meta device shows it; or, as in Reformer, a
    function with a backward pass of its own calls them, and asks them for their gradients directly.
    """
    kinds = list(layer_kinds(model).values())
    silent = set(range(len(kinds)))
    reversible = {name for name, layer in transformer_layers(model) if hasattr(layer, "backward_pass")}

    def watch(trial: nn.Module) -> None:
        for number, (_, layer) in enumerate(transformer_layers(trial)):
            layer.register_forward_pre_hook(lambda *_, number=number: silent.discard(number))

    try:
        trial_forward(shortened(model, {names[0] for names in kinds}), watch)
    except Exception:
        return reversible
    return reversible | {name for number in silent for name in kinds[number]}


def every_parameter_counts(model: nn.Module) -> bool:
    """Whether all that is trained of ``model``, on the meta device, gets a gradient in each pass.

    False also where nobody knows: code that looks at values, which nobody has computed.
    """
    settings = cast("PreTrainedModel", model).config.to_dict()
    if any(value for key, value in settings.items() if key.endswith("layerdrop")):
        return False
    one_of_each = {names[0] for names in layer_kinds(model).values()}
    tried: list[nn.Module] = []
    try:
        small = shortened(model, one_of_each).to(torch.bfloat16)  # the one type that every kernel has
        output = trial_forward(small, tried.append, gradients=True)
        output.logits.sum().backward()
    except Exception:
        return False
    return all(p.grad is not None for p in tried[0].parameters() if p.requires_grad)


def trial_forward(
    model: nn.Module, prepare: Callable[[nn.Module], None] = lambda _: None, *, gradients: bool = False
) -> Any:
    """What a copy of ``model`` returns for two tokens on the meta device, where nothing is computed.

    Args:
        model: on the meta device, with buffers anywhere.
        prepare: called with the copy before its forward pass.
        gradients: whether a backward pass may follow.
    """
    trial: Any = copy.deepcopy(model)
    trial.to("meta").eval()
    prepare(trial)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens}
    if trial.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.set_grad_enabled(gradients), no_look_at_values():
        return trial(**inputs)


def transformer_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated layers, by name: what is sharded, checkpointed and initialised as a unit."""
    classes = {name for m in model.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    # Members of a list only: some models declare their embeddings too, whose weights the head may share.
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    members = [(f"{name}.{child}", m) for name, entries in lists for child, m in entries.named_children()]
    found = [(name, m) for name, m in members if type(m).__name__ in classes]
    if not found and lists:
        name, largest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
        found = list(_members(name, largest))
    names = {name for name, _ in found}
    return [(name, m) for name, m in found if not any(name.startswith(f"{n}.") for n in names)]


def _members(name: str, entries: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What stands in a list of modules, or in lists within it: a list itself is never called."""
    for child, module in entries.named_children():
        if type(module) is nn.ModuleList:
            yield from _members(f"{name}.{child}", module)
        else:
            yield f"{name}.{child}", module


LayerKinds = dict[tuple[Any, ...], list[str]]


def layer_kinds(model: nn.Module) -> LayerKinds:
    """The names of the layers, by what makes them equal: where they stand, class, shapes and attributes."""
    kinds: LayerKinds = defaultdict(list)
    for name, layer in transformer_layers(model):
        parent, _, _ = name.rpartition(".")
        shapes = tuple((key, tuple(p.shape)) for key, p in layer.named_parameters())
        plain = [
            (key, value)
            for module in layer.modules()
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and "layer_idx" not in key and "idx" not in key
        ]
        kinds[(parent, type(layer), shapes, tuple(plain))].append(name)
    return dict(kinds)


def shortened(model: nn.Module, kept: Collection[str]) -> Any:
    """A copy of ``model`` with those of its layers alone, under consecutive numbers."""
    memo: dict[int, Any] = {}
    lists: dict[str, list[str]] = defaultdict(list)
    for name, layer in transformer_layers(model):
        parent, _, child = name.rpartition(".")
        lists[parent].append(child)
        if name not in kept:
            memo[id(layer)] = None
    small = copy.deepcopy(model, memo)
    for parent, children in lists.items():
        holder = small.get_submodule(parent)
        remaining = [m for child in children if (m := holder._modules[child]) is not None]
        holder._modules.clear()
        for i, layer in enumerate(remaining):
            holder.add_module(str(i), layer)
    return small


def materialize(model: nn.Module, device: torch.device, *, parameters: torch.device | None = None) -> None:
    """Allocate the model on ``device``: parameters uninitialised, buffers copied, tied weights still tied.

    Args:
        model: on the meta device. device: where it computes.
        parameters: where its parameters wait between uses, if that is elsewhere.
    """

    def parameter(_: str, meta: nn.Parameter) -> nn.Parameter:
        place = parameters or device
        return nn.Parameter(torch.empty_like(meta, device=place), requires_grad=meta.requires_grad)

    replace_tensors(model, parameter, lambda _, buffer: buffer.to(device))


def replace_tensors(
    model: nn.Module,
    parameter: Callable[[str, nn.Parameter], nn.Parameter],
    buffer: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Put others in the place of the model's parameters and buffers; tied weights stay tied.

    Args:
        parameter: from the first name of a parameter, and the parameter, what to put in its place. Called
            once for a tied one. buffer: the same for a buffer.
    """
    replaced: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        dotted = f"{prefix}." if prefix else ""
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in replaced:
                replaced[id(old)] = parameter(dotted + name, old)
            module._parameters[name] = replaced[id(old)]
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = buffer(dotted + name, value)


def embeddings(model: nn.Module) -> list[nn.Parameter]:
    """The lookup tables of ``model``; one of them may be the output head's matrix as well."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return [parameter for table in tables for parameter in table.parameters(recurse=False)]


def looked_up_table(model: PreTrainedModel) -> nn.Parameter | None:
    """The embedding of tokens, float ``[vocabulary, hidden]``; None for a model that has no such table."""
    try:
        table = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        return None
    return table if isinstance(table, nn.Parameter) else None


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """For each parameter, by the name under which it is listed first, the other names that it also has."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {first: others for first, *others in names.values()}


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (each once) and persistent buffers, by name: what a checkpoint holds of the model."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
    return tensors


def check_vocabulary(model: PreTrainedModel, tokenizer_size: int) -> None:
    """Raise UserError if the tokenizer can produce ids that the embedding has no row for."""
    table = looked_up_table(model)
    if table is not None and tokenizer_size > (rows := table.shape[0]):
        raise UserError(
            f"data.tokenizer: it has {tokenizer_size} tokens and the model's vocabulary only {rows}; "
            f"set model.config.vocab_size to at least {tokenizer_size} or choose another tokenizer"
        )


def check_length(config: PretrainedConfig, run: RunConfig) -> None:
    """Raise UserError for sequences longer than the model has positions."""
    seq_len = run.data.longest
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return
    padding = getattr(text, "pad_token_id", None)
    if isinstance(padding, int) and positions - padding - 1 < seq_len <= positions:
        positions -= _reserved_positions(config)
    if positions < seq_len:
        key = "data.seq_len" if seq_len == run.data.seq_len else "data.target_seq_len"
        if run.model.name_or_path is None:
            remedy = "or raise model.config.max_position_embeddings"
        else:  # what it was trained with is not ours to change
            remedy = "or name a model with more positions in model.name_or_path"
        raise UserError(
            f"{key}: {seq_len} tokens are more than the model's {positions} positions; lower it, {remedy}"
        )


def _reserved_positions(config: PretrainedConfig) -> int:
    """Rows of the position table that no token gets: RoBERTa and its kin count from the padding id on."""
    from accelerate import init_empty_weights
    from transformers import AutoModel

    try:
        with init_empty_weights():
            # A config whose class came with the model was trusted when it was loaded. Always said: left out,
            # transformers asks on the standard input.
            trusted = type(config).__module__.startswith("transformers_modules.")
            model: nn.Module = AutoModel.from_config(copy.deepcopy(config), trust_remote_code=trusted)
    except Exception:  # build_model says what is wrong with the config
        return 0
    reserved = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            reserved = max(reserved, module.padding_idx + 1)
    return reserved


def _model_types() -> list[str]:
    from transformers.models.auto import configuration_auto

    names: Any = configuration_auto.CONFIG_MAPPING_NAMES
    return list(names)


def _nearest(word: str, names: Any) -> str:
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
