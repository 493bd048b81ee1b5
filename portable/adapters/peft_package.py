"""peft, imported without torch's compiler: import it from here."""

from __future__ import annotations

from contextlib import suppress

from portable.errors import UserError
from portable.model.quantized import bitsandbytes

# peft imports it where it is installed, and it imports the compiler.
with suppress(UserError):
    bitsandbytes()

import peft

__all__ = ["peft"]
