"""Write all output formats, and replace the output atomically."""
