// Stands in for torch's header of this name when DeepSpeed's ops are built for the tests: tensors and bindings,
// without the thousands of operators and the C++ frontend (modules, optimizers, data loaders), which no op uses.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>

namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}
