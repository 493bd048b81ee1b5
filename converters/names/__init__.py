"""Names of tensors: plain, tied, numbered or renamed."""
