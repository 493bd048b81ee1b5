"""Files and objects: reading and writing, on a disk or in an object store."""
