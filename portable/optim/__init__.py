"""The update: optimizers, learning rates, and updates that are not finite."""
