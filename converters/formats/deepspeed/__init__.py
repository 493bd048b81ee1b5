"""Readers of DeepSpeed checkpoints."""
