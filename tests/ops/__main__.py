"""Build DeepSpeed's ops: ``python -m tests.ops [cpu_adam] [async_io]``, all of them by default."""

from __future__ import annotations

import subprocess
import sys
import time

from tests import ops


def main(names: list[str]) -> int:
    ops.prepare_environment()
    for name in names or list(ops.OPS):
        if name == "async_io" and not ops.libaio():
            continue
        start = time.monotonic()
        try:
            ops.build(name)
        except subprocess.CalledProcessError as error:
            print(error.output.decode(errors="replace"), file=sys.stderr)
            return 1
        print(f"DeepSpeed's {name}: {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
