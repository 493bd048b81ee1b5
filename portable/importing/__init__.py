"""Conversion of other trainers' config files to settings of a run.

Each program has a module with a table from its keys to entries of the kinds in
:mod:`portable.importing.foreign_keys`: :mod:`~portable.importing.trl` (also the Trainer and its example
scripts), :mod:`~portable.importing.axolotl`, :mod:`~portable.importing.llama_factory`,
:mod:`~portable.importing.ms_swift`, :mod:`~portable.importing.torchtune`,
:mod:`~portable.importing.accelerate` and :mod:`~portable.importing.deepspeed`.
:mod:`portable.importing.programs` lists the programs and converts their files. ``python -m
portable.importing.reference`` writes docs/wild.md from the tables.
"""
