"""One tensor: its pieces, its dtype, its casts."""
