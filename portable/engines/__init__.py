"""The DDP and FSDP2 engines, which run on any device that torch.distributed supports.

The modules in this package call most device-specific code through the device's
:class:`portable.engines.package.TorchPackage`, and otherwise use torch's device-independent
functions. The DeepSpeed engine is in :mod:`portable.gpu.zero`. The packages of all engines
that use torch.distributed are listed in :data:`portable.registry.ENGINE_PACKAGES`.
"""

import os

# transformers and accelerate import torch_xla if it is installed, which takes seconds and starts a runtime
# that this package does not need. This variable prevents it, but must be set before they are imported.
os.environ.setdefault("USE_TORCH_XLA", "0")
