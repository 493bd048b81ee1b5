"""Evaluation: metrics as sums over all ranks, the best checkpoints, early stopping."""
