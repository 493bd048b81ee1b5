"""Data pipeline of a run, from files and Hub datasets to batches.

The data passes through these packages:

1. :mod:`portable.data.sources` reads documents, conversations or tokens from files, the Hub
   or user-defined code.
2. :mod:`portable.data.tokens` tokenizes the documents and stores the tokens in a cache of
   memory-mapped files. A stream is divided into shards, which are files or parts of files.
   Each shard has a separate cache, which is built during training.
3. :mod:`portable.data.samples` builds samples of a fixed shape from the cache and
   determines their order. Its loaders yield the micro-batches of a rank.

``tokenization.py`` combines these steps for one source, and ``dataset.py`` for all sources
of a run.
"""
