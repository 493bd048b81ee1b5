"""Reader of Orbax checkpoints."""
