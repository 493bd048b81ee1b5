"""Train adapters: small trainable tensors that peft adds to a frozen base model.

:mod:`.settings` converts the section ``adapter`` to peft's config, :mod:`.adapter` injects peft's
modules into the model, :mod:`.initial` computes the initial values of these modules, and
:mod:`.assemble` builds the complete model of a run.
"""
