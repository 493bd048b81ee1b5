"""Last import of the process that ranks are forks of: the collector of garbage then ignores all imports.

Otherwise each rank would search through the objects of all imported modules, which takes longer than its run.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
