"""Backends on torch.distributed: DDP and FSDP2 on CUDA (NCCL) and on CPU (gloo)."""
