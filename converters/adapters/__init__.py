"""Read peft's adapters, parse their names and settings, and merge them into a base model."""
