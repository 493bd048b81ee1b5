"""Dequantize checkpoints, and quantize them like the reference implementation of each format.

The modules `dequantize` and `quantize` define the tensor names and the config settings of each
format. The arithmetic is in `portable.converters.tensors.dequantization` and
`portable.converters.tensors.quantization`. This package imports only the modules for checkpoints
and tensors, and their dependencies.
"""
