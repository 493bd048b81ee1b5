"""Metrics of an evaluation, selection of the best checkpoints, and early stopping."""
