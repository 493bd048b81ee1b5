"""Files that hold tensors: pickles, torch.save archives, shard indexes. None is executed."""
