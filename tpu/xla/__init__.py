"""Backend based on torch_xla with SPMD."""
