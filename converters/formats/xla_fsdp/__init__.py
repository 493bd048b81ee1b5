"""Reader of PyTorch/XLA FSDP checkpoints."""
