"""The run: configuration, launch, data, model, optimizer, the training loop, checkpoints."""
