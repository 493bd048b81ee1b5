"""Backend based on TorchTPU, PyTorch's native TPU support, with one rank per chip.

It uses the engines of :mod:`portable.engines`.
"""
