"""Dequantize checkpoints, and quantize them as the reference implementations of the formats do.

`dequantize` and `quantize` contain the names and settings of each format. The arithmetic is in
`portable.converters.tensors.dequantization` and `portable.converters.tensors.quantization`. This
package only imports checkpoints, tensors, and their dependencies.
"""
