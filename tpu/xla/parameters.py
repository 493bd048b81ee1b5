"""Storage of a model's parameters on the devices.

If several layers run in a compiled loop, the same parameter from all these layers is stored as one
stacked tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from portable.errors import require
from portable.model.parameters import get_checkpointed_tensors, get_state_tensors, replace_tensors
from portable.tpu.xla.layout import LocalShard
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from portable.model.weight_sources import ReadableTensor
    from portable.tpu.xla.layout import MeshLayout, Spec


class DeviceParameters:
    """Parameters of a model on the device mesh.

    If layers run in a loop, the same parameter from all these layers is stored as one tensor
    ``[layers, ...]``, called a stack. Therefore, neither the loop nor the update has to stack the
    parameters. A stack is named after its first parameter. In the model itself, the stacked
    parameters stay on the meta device. A checkpoint contains them separately, with their original
    names. Parameters and stacks are zero until :meth:`fill_tensor` is called.

    Args:
        model: Model on the meta device. Its parameters and buffers are replaced with device
            tensors, except for stacked parameters.
        layout: Placement of tensors on the devices.
        stacks: Names of the parameters to stack, in layer order, keyed by the first name.

    Attributes:
        stacks: Names of the parameters in each stack, keyed by the first name.
        by_name: Parameters and stacks, keyed by name.

    Raises:
        UserError: If ``xla.sharding`` specifies different shardings for the layers in a stack,
            specifies a dim that cannot be sharded, or contains a pattern that determines no
            parameter's sharding.
    """

    def __init__(self, model: nn.Module, layout: MeshLayout, stacks: Mapping[str, Sequence[str]]) -> None:
        self._model, self._layout, self.stacks = model, layout, dict(stacks)
        self._stacked_names = {name for names in stacks.values() for name in names}
        metas = dict(model.named_parameters())
        for first, names in stacks.items():
            specs = {layout.get_parameter_spec(name, metas[name].shape) for name in names}
            require(
                len(specs) == 1,
                f"xla.scan_layers: xla.sharding shards {first} of one layer differently from the same "
                "parameter of the next layer; use a pattern that matches the parameter in every layer, "
                "or set xla.scan_layers: false",
            )

        def place_parameter(name: str, meta: nn.Parameter) -> nn.Parameter:
            if name in self._stacked_names:
                return meta
            placed = layout.create_zeros(meta.shape, meta.dtype, layout.get_parameter_spec(name, meta.shape))
            return nn.Parameter(placed, requires_grad=meta.requires_grad)

        replace_tensors(model, place_parameter, lambda _, value: layout.replicate(value))
        layout.check_sharding_rules()
        self.by_name = {n: p for n, p in model.named_parameters() if n not in self._stacked_names}
        for first, names in stacks.items():
            meta = metas[first]
            shape = (len(names), *meta.shape)
            placed = layout.create_zeros(
                shape, meta.dtype, (None, *layout.get_parameter_spec(first, meta.shape))
            )
            self.by_name[first] = nn.Parameter(placed, requires_grad=meta.requires_grad)

    def get_parameter_names(self, tensor_name: str) -> list[str]:
        """Return the names of the parameters that are stored in a tensor.

        A stack is one tensor that stores the same parameter of several layers, for example all
        their norm weights. Any other tensor stores a single parameter, so the result contains only
        its own name.

        Args:
            tensor_name: Name of a parameter or a stack. A stack has the name of its first
                parameter.
        """
        return list(self.stacks.get(tensor_name, [tensor_name]))

    def get_tensor_spec(self, name: str, shape: Sequence[int]) -> Spec:
        """Return the spec of a tensor: the mesh axes over which each of its dims is sharded.

        The tensor is a parameter or a stack, which contains the same parameter of several layers.
        Gradients and optimizer state with the same shape have the same spec.

        Args:
            name: Name of the parameter or stack. A stack has the name of its first parameter.
            shape: Shape of the tensor.
        """
        if name in self.stacks:
            return (None, *self._layout.get_parameter_spec(name, shape[1:]))
        return self._layout.get_parameter_spec(name, shape)

    def get_state_tensors(self) -> dict[str, Tensor]:
        """Return parameters, stacks and persistent buffers, keyed by name.

        A stack is one tensor that holds the same parameter of several layers. It replaces these
        parameters in the result, and has the name of its first parameter.
        """
        unstacked = {n: t for n, t in get_state_tensors(self._model).items() if n not in self._stacked_names}
        return {**unstacked, **{name: self.by_name[name] for name in self.stacks}}

    def get_stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved in checkpoints, keyed by name.

        With a peft adapter, the tensors are only the trained parameters and stacks. Otherwise, they
        are all parameters, stacks and persistent buffers. A stack contains the same parameter from
        several layers, and is named after the first one.
        """
        stored = get_checkpointed_tensors(self._model).keys()
        return {name: tensor for name, tensor in self.get_state_tensors().items() if name in stored}

    @torch.no_grad()
    def fill_tensor(
        self, name: str, tensor: Tensor, spec: Spec, sources: Mapping[str, ReadableTensor]
    ) -> None:
        """Fill a device tensor with stored values. Only this host's shards are read.

        The tensor is a parameter, a buffer, a stack, or an optimizer state tensor of a parameter or
        stack. A stack is one tensor that holds the same parameter of several layers. It is filled
        one layer at a time, and all pending operations are executed after each layer.

        Args:
            name: Name of the parameter, buffer or stack.
            tensor: Device tensor to fill.
            spec: Mesh axes over which each dim of the tensor is sharded.
            sources: Stored tensors, keyed by parameter or buffer name. If a name is missing, the
                values on the device are kept.
        """
        if name not in self.stacks:
            if name in sources:
                self._layout.fill_local_shards(tensor, spec, sources[name])
            return
        for index, parameter_name in enumerate(self.stacks[name]):
            if parameter_name not in sources:
                continue
            # Fill one layer at a time, so that the host never has more than its shards of one layer in
            # memory.
            layer = self._layout.create_zeros(tensor.shape[1:], tensor.dtype, spec[1:])
            self._layout.fill_local_shards(layer, spec[1:], sources[parameter_name])
            is_layer = torch.arange(len(tensor)).eq(index).view(-1, *[1] * layer.dim())
            tensor.copy_(torch.where(self._layout.replicate(is_layer), layer, tensor))
            xla.mark_sharding(tensor, self._layout.to_op_sharding(spec))
            self._layout.cut_graph()

    def split_stack_shards(self, name: str, shards: Sequence[LocalShard]) -> dict[str, list[LocalShard]]:
        """Split the shards of a stack into shards of its parameters.

        A stack is one tensor that holds the same parameter of several layers. The shards of a
        parameter that is not in a stack are returned unchanged.

        Args:
            name: Name of the parameter or stack.
            shards: Shards of the tensor.

        Returns:
            Shards of each parameter, keyed by parameter name.
        """
        if name not in self.stacks:
            return {name: list(shards)}
        return {
            parameter_name: [LocalShard(shard.offsets[1:], shard.values[index]) for shard in shards]
            for index, parameter_name in enumerate(self.stacks[name])
        }
