"""Checkpoints of quantized weights: opened as floats, and written as the formats' own programs write them.

`dequantize` and `quantize` know the names and settings of each format. The arithmetic is in
`portable.converters.tensors.dequantization` and `portable.converters.tensors.quantization`. Imports nothing
but checkpoints, tensors and what they stand on.
"""
