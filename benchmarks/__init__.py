"""Benchmarks that compare this project with other training libraries, taking turns in one run."""

import portable  # noqa: F401  # before torch, which would open every device
