"""Optimizers, learning-rate schedules, and detection of non-finite updates."""
