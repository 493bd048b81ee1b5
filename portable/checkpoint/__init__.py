"""Checkpoints: written, found, matched with a model; those of other programs too."""
