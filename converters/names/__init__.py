"""Names of tensors: canonical names, tied weights, and rules between published files and memory."""
