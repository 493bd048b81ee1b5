"""Hide all imported objects from the garbage collector. The import of this module has this effect.

This must be the last import of the process from which ranks are forked. Otherwise the garbage collector of
each rank would search the objects of all imported modules, which takes longer than the run of the rank.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
