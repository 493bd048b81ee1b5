"""From the token cache to batches, in order."""
