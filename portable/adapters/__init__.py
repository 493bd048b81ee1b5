"""Adapters: small trained tensors in a frozen base model, created by peft.

`settings` turns the section ``adapter`` into peft's config, `adapter` injects the modules, `initial` computes
their initial values, and `assemble` builds the complete model of a run.
"""
