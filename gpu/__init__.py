"""CUDA: the record of its GPUs and their memory; and DeepSpeed ZeRO, which also runs on the CPU."""
