"""Read DeepSpeed checkpoints."""
