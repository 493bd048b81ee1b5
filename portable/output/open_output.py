"""Opens a run's output folder, local or in an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.storage.object_store import RemotePath
from portable.output.output_dir import LocalOutput
from portable.output.remote_output_dir import RemoteOutput
from portable.paths import place_of

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.output.output_dir import Output


def open_output(config: RunConfig, rank: int = 0) -> Output:
    """Return the output that ``output_dir`` names.

    Raises:
        UserError: if it cannot be used.
    """
    place = place_of("output_dir", config.output_dir)
    if isinstance(place, RemotePath):
        return RemoteOutput(place, rank, config.checkpoint.staging_dir)
    return LocalOutput(place, rank)
