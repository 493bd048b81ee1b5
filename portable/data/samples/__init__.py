"""Datasets with samples of a fixed shape, the order of the samples, and loaders of micro-batches."""
