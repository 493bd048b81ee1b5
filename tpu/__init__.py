"""Backends on TPUs: ``xla`` on torch_xla, and ``tpu`` on TorchTPU."""
