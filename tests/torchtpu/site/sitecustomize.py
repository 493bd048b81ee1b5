"""Lets each Python of a test find a slice of TPU chips: see ``tests/torchtpu/stand_in.py``."""

import os
import sys

if "STAND_IN_ROOM" in os.environ:
    sys.path.append(os.environ["STAND_IN_PROJECT"])
    from tests.torchtpu.stand_in import find_chips

    find_chips()
