"""Everything that knows transformers: models, their weights, their loss."""
