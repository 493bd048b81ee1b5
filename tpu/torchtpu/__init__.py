"""Backend based on TorchTPU, PyTorch's native TPU support, with one rank per chip.

The backend uses the engines of :mod:`portable.engines`.
"""
