"""Conversion of other trainers' config files to settings of a run.

Each program has a module with a table of its keys. An entry of a table converts the values of a key. The
types of entries are in :mod:`portable.importing.foreign_keys`. The modules are :mod:`~portable.importing.trl`
(also the Trainer and its example scripts), :mod:`~portable.importing.axolotl`,
:mod:`~portable.importing.llama_factory`, :mod:`~portable.importing.ms_swift`,
:mod:`~portable.importing.torchtune`, :mod:`~portable.importing.accelerate` and
:mod:`~portable.importing.deepspeed`. :mod:`portable.importing.programs` lists the programs and converts their
files. ``python -m portable.importing.reference`` writes docs/keys.md from the tables.
"""
