"""What torch itself can do on any device: DDP and FSDP2, and the backend on torch.distributed.

Knows devices through the record :class:`portable.engines.package.TorchPackage` alone. DeepSpeed's engine, in
:mod:`portable.gpu.zero`, is found through :data:`portable.registry.ENGINE_PACKAGES`.
"""

import os

# transformers and accelerate import torch_xla if it is installed, which takes seconds and starts a runtime
# this package does not need. Set it before their import; a value set by the user holds.
os.environ.setdefault("USE_TORCH_XLA", "0")
