"""Run ``portable-train`` and record each rank's mesh: ``python -m tests.gpu.mesh_of_rank FOLDER ...``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from portable import cli
from portable.config import RunConfig
from portable.engines.engine_interface import RankInfo
from portable.engines.fsdp import sharding

NODE = ("GROUP_RANK", "SLURM_NODEID")


def main(folder: Path, arguments: list[str]) -> int:
    original = sharding._build_mesh

    def recorded(config: RunConfig, rank_info: RankInfo, shard_group_size: int) -> DeviceMesh:
        mesh = original(config, rank_info, shard_group_size)
        found = {
            "node": next(int(os.environ[name]) for name in NODE if name in os.environ),
            "names": mesh.mesh_dim_names,
            "ranks": mesh.mesh.tolist(),
        }
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
        return mesh

    sharding._build_mesh = recorded
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
