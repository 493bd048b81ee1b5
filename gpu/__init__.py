"""The backend on torch.distributed (CUDA with NCCL, CPU with gloo): DDP, FSDP2 and DeepSpeed ZeRO."""

import os

# transformers and accelerate import torch_xla if it is installed, which takes seconds and starts a runtime
# this package does not need. Set it before their import; a value set by the user holds.
os.environ.setdefault("USE_TORCH_XLA", "0")
