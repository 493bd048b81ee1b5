"""Hide all imported objects from the garbage collector as a side effect of being imported.

This must be the last import before a process forks ranks. Otherwise, the garbage collector of each
rank would traverse the objects of all imported modules, which takes longer than the rank itself
runs.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
