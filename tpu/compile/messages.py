"""XLA protocol buffer messages that this package uses, reduced to the fields that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DecodeError", "assign_partitions_to_devices", "encode_buffer_donors", "xla_messages"]

_MESSAGE_FIELDS = """
LayoutProto memory_space:8:int64
ShapeProto element_type:2:int32 dimensions:3:int64* tuple_shapes:4:ShapeProto* layout:5:LayoutProto
ProgramShapeProto parameters:1:ShapeProto*
LiteralProto s32s:4:int32* s64s:5:int64* u32s:6:uint32* u64s:7:uint64*
OpMetadata op_name:2:string source_file:3:string source_line:4:int32
WindowDimension size:1:int64 stride:2:int64 padding_low:3:int64 window_dilation:5:int64
  base_dilation:6:int64
Window dimensions:1:WindowDimension*
ConvolutionAxes kernel_input_feature:3:int64 output_batch:9:int64 output_feature:10:int64
  input_spatial:11:int64* output_spatial:12:int64*
ReplicaGroup replica_ids:1:int64*
IotaReplicaGroupList num_devices_per_group:2:int64
CollectiveDeviceList replica_groups:1:ReplicaGroup* iota:2:IotaReplicaGroupList
HloInstructionProto name:1:string opcode:2:string shape:3:ShapeProto metadata:7:OpMetadata
  literal:8:LiteralProto parameter_number:9:int64 tuple_index:13:int64 window:15:Window
  convolution_axes:16:ConvolutionAxes channel_id:26:int64 custom_call_target:28:string id:35:int64
  operand_ids:36:int64* called_computation_ids:38:int64* backend_config:43:bytes is_host_transfer:47:bool
  replica_groups:49:ReplicaGroup* comparison_direction:63:string device_list:87:CollectiveDeviceList
HloComputationProto name:1:string instructions:2:HloInstructionProto* id:5:int64 root_id:6:int64
  is_fusion:7:bool
InstructionSequence instruction_ids:1:int64*
ScheduleEntry computation_id:1:int64 sequence:2:InstructionSequence
HloScheduleProto sequences:1:ScheduleEntry*
BufferDonorEntry parameter_number:1:int64
HloBufferDonorProto entries:1:BufferDonorEntry*
HloModuleProto computations:3:HloComputationProto* host_program_shape:4:ProgramShapeProto
  entry_computation_id:6:int64 schedule:7:HloScheduleProto buffer_donor:18:HloBufferDonorProto
HloModuleWithConfig hlo_module:1:bytes
BufferAllocation size:2:int64 is_entry_parameter:5:bool maybe_live_out:7:bool color:8:int64
BufferAssignment buffer_allocations:3:BufferAllocation*
HloProto hlo_module:1:bytes buffer_assignment:3:BufferAssignment
ComputationDevices replica_device_ids:1:int64*
DeviceAssignment replica_count:1:int32 computation_count:2:int32 computation_devices:3:ComputationDevices*
ExecutableBuildOptions device_ordinal:1:int64 num_replicas:4:int64 num_partitions:5:int64
  use_spmd_partitioning:6:bool device_assignment:9:DeviceAssignment
  allow_spmd_sharding_propagation_to_output:12:bool*
CompileOptions parameter_is_tupled_arguments:2:bool executable_build_options:3:ExecutableBuildOptions
  env_option_overrides:7:bytes*
"""
"""Definition of each message: the name of the message, and its fields as ``name:number:type``.

The type of a field is a scalar type or another message. A star marks a repeated field.
"""


class _MessageClasses:
    """Namespace with a class for each message in ``_MESSAGE_FIELDS``, such as ``HloModuleProto``.

    The single instance is :data:`xla_messages`. A message keeps the fields that ``_MESSAGE_FIELDS``
    does not define, so it can be parsed, changed and serialized without losing data.
    """

    def __init__(self) -> None:
        file = descriptor_pb2.FileDescriptorProto(name="portable/xla.proto", package="xla", syntax="proto3")
        field_descriptor = descriptor_pb2.FieldDescriptorProto
        for word in _MESSAGE_FIELDS.split():
            name, *number_and_type = word.split(":")
            if not number_and_type:
                message = file.message_type.add(name=name)
                continue
            number, type_name = number_and_type
            field = message.field.add(name=name, number=int(number))
            field.label = (
                field_descriptor.LABEL_REPEATED
                if type_name.endswith("*")
                else field_descriptor.LABEL_OPTIONAL
            )
            type_name = type_name.removesuffix("*")
            if type_name[0].isupper():
                field.type, field.type_name = field_descriptor.TYPE_MESSAGE, f".xla.{type_name}"
            else:
                field.type = field_descriptor.Type.Value(f"TYPE_{type_name.upper()}")
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        self._descriptors = {
            message_type.name: pool.FindMessageTypeByName(f"xla.{message_type.name}")
            for message_type in file.message_type
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self._descriptors:
            raise AttributeError(name)
        return message_factory.GetMessageClass(self._descriptors[name])


xla_messages: Any = _MessageClasses()


def assign_partitions_to_devices(build_options: Any, device_ids: Sequence[int]) -> None:
    """Configure build options for one replica of a program, with one partition per device.

    Args:
        build_options: ``ExecutableBuildOptions`` message. Modified in place.
        device_ids: Device IDs, in the order of the partitions.
    """
    device_groups = [
        xla_messages.ComputationDevices(replica_device_ids=[device_id]) for device_id in device_ids
    ]
    build_options.num_replicas, build_options.num_partitions = 1, len(device_groups)
    build_options.device_assignment.CopyFrom(
        xla_messages.DeviceAssignment(
            replica_count=1, computation_count=len(device_groups), computation_devices=device_groups
        )
    )


def encode_buffer_donors(parameters: Sequence[int]) -> bytes:
    """Encode a list of parameters whose buffers the results may reuse.

    Args:
        parameters: Parameter numbers.

    Returns:
        Bytes to append to a serialized ``HloModuleProto``.
    """
    entries = [xla_messages.BufferDonorEntry(parameter_number=number) for number in parameters]
    donors = xla_messages.HloBufferDonorProto(entries=entries) if entries else None
    return bytes(xla_messages.HloModuleProto(buffer_donor=donors).SerializeToString())
