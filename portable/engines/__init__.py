"""Engines that support any torch device (DDP and FSDP2), and the backend on torch.distributed.

The modules in this package call device-specific code only through the device's
:class:`portable.engines.package.TorchPackage`. The DeepSpeed engine is in :mod:`portable.gpu.zero`.
The packages of all engines are listed in :data:`portable.registry.ENGINE_PACKAGES`.
"""

import os

# transformers and accelerate import torch_xla if it is installed. The import takes seconds and starts a
# runtime that this package does not need. Set the variable before they are imported, unless the user has set
# it.
os.environ.setdefault("USE_TORCH_XLA", "0")
