"""The backend on torch_xla."""
