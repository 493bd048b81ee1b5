"""The output folder: who owns it, and what stands in it."""
