"""Compile the graphs of a run for a TPU, without a TPU."""
