"""Sources of documents or tokens: files, Hub datasets, user-defined records and pretokenized files."""
