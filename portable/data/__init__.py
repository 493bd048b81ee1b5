"""Data: sources, tokens, samples, and what a run makes of them."""
