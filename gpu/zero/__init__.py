"""DeepSpeed ZeRO."""
