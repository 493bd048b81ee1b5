"""Turn off garbage collection before other imports, because it takes a quarter of their time.

:mod:`tests.preloaded` turns it on again. In pytest's processes, the end of the collection of tests does.
"""

import gc

gc.disable()
