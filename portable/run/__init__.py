"""One launch of a run, a stage a file."""
