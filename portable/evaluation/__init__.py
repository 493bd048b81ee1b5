"""Compute evaluation metrics, select the best checkpoints, and stop early."""
