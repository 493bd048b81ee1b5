"""Read FSDP checkpoints with one `torch.save` file per rank."""
