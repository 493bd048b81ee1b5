"""Backends on torch.distributed: DDP and FSDP2, on CUDA with NCCL and on CPU with gloo."""

import os

# transformers and accelerate import torch_xla wherever it is installed, which takes seconds and starts a
# runtime. This room never needs it. (Set before either of them is imported; a person's own value stays.)
os.environ.setdefault("USE_TORCH_XLA", "0")
