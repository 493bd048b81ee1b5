"""The backend on torch_xla, with SPMD: one process drives all devices of a host."""
