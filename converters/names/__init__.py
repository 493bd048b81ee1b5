"""Handle tensor names: canonical names, tied weights, and published and in-memory names."""
