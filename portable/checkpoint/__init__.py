"""Save, find and restore the checkpoints of a run, and resume from checkpoints of other trainers."""
