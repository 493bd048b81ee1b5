"""The backend on torch_xla, with SPMD."""
