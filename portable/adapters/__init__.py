"""Adapters: small trained tensors beside a frozen model. peft makes the modules, names and files."""
