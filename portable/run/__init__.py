"""One launch of a run, with one module per stage: resolve, prepare, restore, train, finish."""
