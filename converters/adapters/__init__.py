"""peft's adapters: their names and settings, and merging them into a base model."""
