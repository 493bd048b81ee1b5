"""Writers of all output formats, and the atomic replacement of the output."""
