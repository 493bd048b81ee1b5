"""Benchmarks of this project. Most compare it with other libraries, which take turns on the same machine."""

import portable  # noqa: F401  # before torch, which would open every device
