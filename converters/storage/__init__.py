"""Bytes at rest, on a disk or in an object store."""
