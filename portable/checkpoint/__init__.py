"""Save, find and restore the checkpoints of a run, and read checkpoints of other trainers."""
