"""Outputs: safetensors, DCP and torch.save files, in folders that appear whole."""
