"""Last import of the process from which ranks are forked: hide imported objects from the garbage collector.

Otherwise, each rank would search through the objects of all imported modules, which takes longer than its
run.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
