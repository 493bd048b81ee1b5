"""Adapters: small trained tensors in a frozen base model, created by peft.

:mod:`.settings` converts the section ``adapter`` to peft's config, :mod:`.adapter` injects the modules,
:mod:`.initial` computes their initial values, and :mod:`.assemble` builds the complete model of a run.
"""
