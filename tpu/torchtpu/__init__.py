"""The backend on TorchTPU, the TPU's own PyTorch: the engines of :mod:`portable.engines`, a rank a chip."""
