"""Datasets of samples with a fixed shape, their order, and loaders of micro-batches."""
