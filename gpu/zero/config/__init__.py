"""A DeepSpeed JSON: read, checked, reconciled with the run's settings."""
