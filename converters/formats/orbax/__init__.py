"""Read Orbax checkpoints."""
