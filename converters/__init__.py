"""How checkpoint formats lie on disk, and one logical view of them all."""
