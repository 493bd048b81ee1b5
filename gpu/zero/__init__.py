"""Training engine based on DeepSpeed ZeRO."""
