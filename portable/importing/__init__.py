"""Convert the config files of other trainers to settings of a run.

Each supported trainer has a module with a table of its config keys. An entry of the table converts
the values of one key. The entry types are in :mod:`portable.importing.foreign_keys`. The modules
are :mod:`~portable.importing.trl` (also for the Trainer and its example scripts),
:mod:`~portable.importing.axolotl`, :mod:`~portable.importing.llama_factory`,
:mod:`~portable.importing.ms_swift`, :mod:`~portable.importing.torchtune`,
:mod:`~portable.importing.accelerate` and :mod:`~portable.importing.deepspeed`.
:mod:`portable.importing.programs` lists the trainers and converts their files. ``python -m
portable.importing.reference`` generates docs/keys.md from the tables.
"""
