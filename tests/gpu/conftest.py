from __future__ import annotations

import multiprocessing

from tests.portable.conftest import zygote  # noqa: F401 - a fixture of these tests, too
from tests.ranks import PRELOADED

multiprocessing.set_forkserver_preload([*PRELOADED, "tests.gpu.preloaded"])
