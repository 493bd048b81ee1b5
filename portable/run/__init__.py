"""Carry out one launch of a run. Each stage has a module: resolve, prepare, restore, train, finish."""
