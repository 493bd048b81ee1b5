"""Backend on CUDA, and the DeepSpeed ZeRO engine."""
