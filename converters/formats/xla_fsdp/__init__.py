"""Read PyTorch/XLA FSDP checkpoints."""
