"""Engine on DeepSpeed ZeRO."""
