"""Backend on TorchTPU, PyTorch's native TPU support, with one rank per chip.

The backend runs the engines of :mod:`portable.engines`.
"""
