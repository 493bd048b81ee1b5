"""Reading and writing of files and objects, on a local disk or in an object store."""
