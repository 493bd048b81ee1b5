"""Read and write files and objects, on a local disk or in an object store."""
