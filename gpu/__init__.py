"""CUDA backend and DeepSpeed ZeRO engine."""
