"""Models: everything that depends on transformers, such as their construction, weights, layers and losses."""
