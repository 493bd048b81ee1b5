"""Write a checkpoint in any of the output formats, and replace an existing output atomically."""
