"""Benchmarks of this project.

Most benchmarks run this project and other libraries in turns on the same machine.
"""

import portable  # noqa: F401  # before torch, which would open every device
