"""Names of tensors: canonical names, tied names, and names for parameters keyed by index."""
