"""Measurements of this project beside its peers, taking turns in one run."""

import portable  # noqa: F401  # before torch, which would open every device
