"""Files that hold tensors: pickles, torch.save archives and shard indexes. No code in them is run."""
