"""Measurements of this project beside its peers, taking turns in one run."""
