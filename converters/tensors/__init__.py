"""Tensors of checkpoints: pieces, dtypes, casts, and lazy operations."""
