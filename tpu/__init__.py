"""TPU backends: ``xla``, based on torch_xla, and ``tpu``, based on TorchTPU."""
