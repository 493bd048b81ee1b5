"""Read files that contain tensors: pickles, torch.save archives, zarr arrays, and shard indexes.

No reader executes code from a file.
"""
