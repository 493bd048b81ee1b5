// Stands in for torch's header of this name when DeepSpeed's ops are built for the tests: the types and the
// bindings, without the C++ frontend (modules, optimizers, data loaders), which no op uses.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>
