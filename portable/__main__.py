"""``python -m portable`` is ``portable-train``."""

from __future__ import annotations

import sys

from portable.cli import main

sys.exit(main())
