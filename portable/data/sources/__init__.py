"""Sources of documents or tokens: files, hub datasets, user-defined records and pretokenized files."""
