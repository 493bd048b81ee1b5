"""Data of a run, from files and hub datasets to batches."""
