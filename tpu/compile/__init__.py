"""Compile a run's graphs for TPUs with libtpu, on a machine without a TPU."""
