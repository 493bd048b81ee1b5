"""One tensor: its pieces, its element type, its casts."""
