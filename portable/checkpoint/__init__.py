"""Save, find and restore checkpoints, including those of other programs."""
