"""A small server that answers readers of a dataset like the Hugging Face hub, also for ranges of files.

python -m tests.hub_datasets URL NAME CACHE    prints the records of a stream of NAME from the server at URL
"""

from __future__ import annotations

import hashlib
import json
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from tests import answers
from tests.answers import Answers

COMMIT = "c0ffee" * 6 + "c0de"


@contextmanager
def serving(
    names: str | tuple[str, ...],
    files: Mapping[str, bytes],
    requests: list[tuple[str, str]],
    *,
    kind: str = "datasets",
) -> Iterator[str]:
    """Serve datasets or models of the same files; yield the URL. ``requests`` gets paths and ranges."""
    root = "" if kind == "models" else f"/{kind}"
    oids = {path: hashlib.sha1(content).hexdigest() for path, content in files.items()}

    folders = {str(PurePosixPath(path).parent) for path in files} - {"."}

    def entry(path: str) -> dict[str, Any]:
        if path in folders:
            return {"type": "directory", "path": path, "size": 0, "oid": "0"}
        return {"type": "file", "path": path, "size": len(files[path]), "oid": oids[path]}

    class Handler(Answers):
        def _json(self, answer: Any) -> None:
            self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _answer(self) -> None:
            body = self.body()
            path = urllib.parse.unquote(self.path.partition("?")[0])
            path = path.replace("/resolve/main/", f"/resolve/{COMMIT}/")
            requests.append((f"{self.command} {path}", self.headers.get("Range") or ""))
            name = next((name for name in _as_tuple(names) if name in path), "")
            api, files_at = f"/api/{kind}/{name}", f"{root}/{name}/resolve/{COMMIT}/"
            if path in (api, f"{api}/revision/{COMMIT}", f"{api}/revision/main"):
                siblings = [{"rfilename": one} for one in files]
                self._json({"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
            elif path.startswith((f"{api}/tree/{COMMIT}", f"{api}/tree/main")):
                folder = PurePosixPath(path.removeprefix(f"{api}/tree/").partition("/")[2].strip("/"))
                self._json([entry(one) for one in (*files, *folders) if PurePosixPath(one).parent == folder])
            elif path == f"{api}/paths-info/{COMMIT}":
                asked = urllib.parse.parse_qs(body.decode())["paths"]
                self._json([entry(one) for one in asked if one in files or one in folders])
            elif (content := files.get(path.removeprefix(files_at))) is not None:
                headers = {"ETag": f'"{oids[path.removeprefix(files_at)]}"', "X-Repo-Commit": COMMIT,
                           "Accept-Ranges": "bytes"}  # fmt: skip
                if (span := self.headers.get("Range")) is not None:
                    first, _, last = span.removeprefix("bytes=").partition("-")
                    stop = min(int(last) + 1 if last else len(content), len(content))
                    headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
                    self.send(206, content[int(first) : stop], headers)
                else:
                    self.send(200, content, headers)
            else:
                self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

        do_GET = do_HEAD = do_POST = _answer  # noqa: N815

    with answers.serving(Handler) as url:
        yield url


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def main(name: str, cache: Path) -> None:
    from portable.data.sources import source_kinds
    from portable.errors import UserError
    from tests.portable.data_support import source

    source_kinds.PART_BYTES = 9_000
    try:
        files: Any = source(name, stream=True, split=sys.argv[4], cache_dir=cache)
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return
    texts = [[found.text for found in part.open(files.settings).iter_documents()] for part in files.parts]
    print(json.dumps({"texts": texts}))


if __name__ == "__main__":
    main(sys.argv[2], Path(sys.argv[3]))
