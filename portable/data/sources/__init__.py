"""Sources: files, hub datasets, user-defined records and tokens of other programs, as documents or tokens."""
