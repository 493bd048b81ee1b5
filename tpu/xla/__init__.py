"""Backend on torch_xla, under SPMD."""
