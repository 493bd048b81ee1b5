"""Read files that contain tensors: pickles, torch.save archives, zarr arrays, OCDBT databases, etc.

The package also reads shard indexes and the headers of GGUF files. No reader executes code from a
file.
"""
