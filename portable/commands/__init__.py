"""Commands that do not train, such as ``portable-chat`` and ``portable-train --dry-run``."""
