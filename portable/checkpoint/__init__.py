"""Checkpoints of a run (saving, finding and restoring them), and checkpoints of other trainers."""
