"""Model construction, weights, layers and losses: all code that depends on transformers."""
