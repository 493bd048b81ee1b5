"""Configuration of a run: the schema, and the functions that read and write configs.

:class:`RunConfig` is the schema. :func:`load_config` builds a config from YAML files and flags,
:func:`dump_yaml` writes a config as YAML, and :func:`find_changes` compares the configs of two runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.converters.lazy_imports import build_lazy_getattr

if TYPE_CHECKING:
    from portable.config.changed_settings import find_changes
    from portable.config.load import load_config
    from portable.config.run_config import RunConfig
    from portable.config.yaml_writer import dump_yaml

__all__ = [
    "RunConfig",
    "dump_yaml",
    "find_changes",
    "load_config",
]

__getattr__ = build_lazy_getattr(__name__)
