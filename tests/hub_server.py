"""A small server that answers uploads like the Hugging Face hub, with faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests import answers
from tests.answers import Answers

TOKEN = "hf_test_token"
DROP, LOST = "drop", "lost"
"""Faults: the request has no effect and no answer, or it has an effect, but its answer is lost."""


@dataclass
class Repository:
    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    """Message, and all files after it."""

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1] if self.commits else {}


@dataclass
class FakeHub:
    """State of the server, and its requests.

    Attributes:
        role: Role of the token: write or read.
        faults: For a part of a request ("PUT /lfs", "/commit/"), the next answers: statuses, DROP or LOST.
        hold: Event that commits wait for, or None.
    """

    role: str = "write"
    repositories: dict[str, Repository] = field(default_factory=dict)
    writable: set[str] = field(default_factory=lambda: {"me", "lab"})
    requests: list[str] = field(default_factory=list)
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    hold: threading.Event | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    url: str = ""

    def fault(self, request: str) -> int | str | None:
        for part, wanted in self.faults.items():
            if part in request and wanted:
                return wanted.pop(0)
        return None

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any], dict[str, str]]:
        if path == "/api/whoami-v2":
            auth = {"accessToken": {"role": self.role}}
            return 200, {"name": "me", "type": "user", "orgs": [{"name": "lab"}], "auth": auth}, {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization") or "me"
            name = f"{owner}/{asked['name']}"
            if owner not in self.writable:
                return 403, {"error": "no rights"}, {}
            if name in self.repositories:
                return 409, {"error": "it exists", "url": f"{self.url}/{name}"}, {}
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.repositories[name] = Repository(private)
            return 200, {"url": f"{self.url}/{name}", "name": name, "id": name}, {}
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return 200, {"errors": [], "warnings": []}, {}
        if path.startswith("/lfs/") and method == "PUT":
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            return 200, {}, {}
        found = re.fullmatch(
            r"(?:/api/models)?/([^/]+/[^/]+?)(?:\.git)?(/auth-check/write|/preupload/main|/commit/main"
            r"|/info/lfs/objects/batch|/revision/main|)",
            path,
        )
        assert found is not None, f"{method} {path}"
        name, what = found.groups()
        repository = self.repositories.get(name)
        if repository is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if what == "/auth-check/write":
            allowed = name.partition("/")[0] in self.writable
            return (200 if allowed else 403), {}, {}
        if what == "/preupload/main":
            files = json.loads(body)["files"]
            return 200, {"files": [self._mode(repository, one["path"]) for one in files]}, {}
        if what == "/info/lfs/objects/batch":
            asked = json.loads(body)["objects"]
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}} for one in asked
            ]
            return 200, {"transfer": "basic", "objects": objects}, {}
        if what == "/commit/main":
            return 200, self._commit(name, repository, body), {}
        return 200, {"id": name, "private": repository.private, "sha": "0" * 40, "siblings": []}, {}

    def _mode(self, repository: Repository, path: str) -> dict[str, Any]:
        large, there = path.endswith(".safetensors"), repository.files.get(path)
        oid = None
        if there is not None:
            blob = b"blob %d\0" % len(there) + there
            oid = hashlib.sha256(there).hexdigest() if large else hashlib.sha1(blob).hexdigest()
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def _commit(self, name: str, repository: Repository, body: bytes) -> dict[str, Any]:
        if self.hold is not None:
            assert self.hold.wait(60)
        files, message = dict(repository.files), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
        repository.commits.append((message, files))
        oid = hashlib.sha1(body).hexdigest()
        return {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(Answers):
        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            request = f"{self.command} {path}"
            hub.requests.append(request)
            body = self.body()
            fault = hub.fault(request)
            if fault == LOST:
                hub.answer(self.command, path, body)
            if fault in (DROP, LOST):
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            status: int
            answer: dict[str, Any]
            headers: dict[str, str] = {}
            if fault is not None:
                status, answer = int(fault), {"error": "a fault"}
            elif not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, answer = 401, {"error": "Invalid credentials in Authorization header"}
                headers["X-Error-Message"] = answer["error"]
            else:
                status, answer, headers = hub.answer(self.command, path, body)
            headers["Content-Type"] = "application/json"
            self.send(status, json.dumps(answer).encode(), headers)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815

    with answers.serving(Handler) as hub.url:
        yield hub
