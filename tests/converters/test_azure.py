"""Azure's protocol, against Azurite: `npm install azurite`, with its `azurite-blob` on the PATH."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from portable.converters.storage import completion_markers as completion
from portable.converters.storage.folder_operations import remove_folder
from portable.converters.storage.object_store import RemotePath
from portable.converters.storage.store_errors import ConflictError, RemoteError
from portable.converters.writers.store_output import FileUpload
from portable.output.lease import Lease

ACCOUNT = "devstoreaccount1"
# The well-known key in the documentation of Azurite.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

pytestmark = pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="needs azurite-blob")


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["azurite-blob", "--silent", "--skipApiVersionCheck", "--blobPort", str(port), "-l", "data"]
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    text = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                _make_container(endpoint)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield "az://container"
    finally:
        server.kill()
        server.wait()


def _make_container(endpoint: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    told = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{told}/{ACCOUNT}/{ACCOUNT}/container\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    url = f"{endpoint}/container?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


def test_remote_path_and_lease_work_on_azure(container: str, tmp_path: Path) -> None:
    folder = RemotePath.from_url(f"{container}/run")
    assert not folder.exists()
    token = completion.mark_folder_incomplete(folder)
    data = os.urandom(20 << 20)
    (tmp_path / "file").write_bytes(data)
    (folder / "a" / "b").upload_file(tmp_path / "file")
    file = FileUpload(folder / "c", len(data))
    file.write(data)
    file.close()
    assert (folder / "a/b").read_bytes() == (folder / "c").read_bytes() == data
    assert (folder / "c").read_range(1, 3) == data[1:3]
    completion.mark_folder_complete(folder, token)
    assert (folder / completion.COMPLETE_MARKER).is_file()
    (folder / "c").move_to(folder / "d")
    assert list(folder.list_objects()) == ["_COMPLETE", "a/b", "d"]
    first = (folder / "x").write_bytes(b"1", expected_version="")
    (folder / "x").write_bytes(b"2", expected_version=first)
    for stale in ("", first):
        with pytest.raises(ConflictError):
            (folder / "x").write_bytes(b"3", expected_version=stale)
    remove_folder(folder)
    assert not folder.exists()
    with Lease(folder) as lease:
        lease.check_not_taken()
    with pytest.raises(RemoteError, match="there is no such bucket"):
        RemotePath.from_url("az://nowhere/x").exists()
