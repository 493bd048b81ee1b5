"""Imported before all else that forks share: a quarter of the time of imports is looking for garbage.

:mod:`tests.preloaded` ends it, and in pytest's processes the end of the collection of tests.
"""

import gc

gc.disable()
