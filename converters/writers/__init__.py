"""Writers of safetensors, DCP and torch.save files, into folders that appear atomically."""
