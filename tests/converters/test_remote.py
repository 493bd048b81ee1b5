"""Object stores: the layer over them, against a real S3 server with real failures; credentials."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import obstore
import pytest

from converters.errors import CheckpointError, redact
from converters.storage import completion_markers as completion
from converters.storage import credentials, range_reader
from converters.storage import object_store as remote
from converters.storage.credentials import OPTIONS
from converters.storage.object_store import RemotePath, matching
from converters.storage.path_or_url import is_url
from converters.storage.places import copy_file, copy_folder, is_unfinished, remove_folder
from converters.storage.range_reader import RemoteFile
from converters.storage.store_errors import AccessDeniedError, ConflictError, RemoteError, RetriesUsedUpError
from converters.writers.remote_draft import UploadedFile
from tests.object_store import ObjectStore, scale_down
from tests.ranks import wait_for


@pytest.fixture(autouse=True)
def in_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "in_full" not in request.fixturenames:
        scale_down(monkeypatch)


@pytest.fixture
def in_full(s3: ObjectStore) -> None:
    """The sizes that there really are, here and at S3."""
    s3.least_part(5 << 20)


@pytest.fixture
def folder(s3: ObjectStore) -> RemotePath:
    return RemotePath.of(s3.url("run"))


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/a") and is_url("gs://bucket") and is_url("S3A://b/c")
    assert not any(map(is_url, ("runs/a", "/runs/a", "C:\\runs", "s3:/bucket", "a b://c", "FILE:///tmp", "")))


def test_reads_as_a_path_does(s3: ObjectStore, folder: RemotePath) -> None:
    for name in ("a.json", "step-1/shard-0.bin", "step-1/shard-1.bin", "step-10/x", "other"):
        s3.put(f"run/{name}", name.encode())
    s3.put("run-2/x", b"")
    assert folder.is_dir() and folder.exists() and not folder.is_file()
    assert sorted(child.name for child in folder.iterdir()) == ["a.json", "other", "step-1", "step-10"]
    step = folder / "step-1"
    assert step.is_dir() and sorted(child.name for child in step.iterdir()) == ["shard-0.bin", "shard-1.bin"]
    shard = folder / "step-1/shard-1.bin"
    assert (shard.name, shard.suffix) == ("shard-1.bin", ".bin")
    assert shard.is_file() and not shard.is_dir() and shard.parent == step
    assert shard.stat().st_size == len("step-1/shard-1.bin")
    assert shard.read_range(2, 6) == b"ep-1" and shard.read_range(10, 10_000) == b"rd-1.bin"
    assert shard.read_text() == shard.open("rb").read().decode() == "step-1/shard-1.bin"
    assert str(shard) == s3.url("run/step-1/shard-1.bin") and shard.is_relative_to(folder)
    assert not RemotePath.of(s3.url("run-2")).is_relative_to(folder)
    assert folder.objects()["step-1/shard-0.bin"].size == 18 and len(folder.objects()) == 5
    for missing in (folder / "nope", step / "nope" / "deeper", RemotePath.of(s3.url("ru"))):
        assert not missing.exists() and not missing.is_file() and not missing.is_dir()
        for act in (missing.iterdir, missing.read_bytes, missing.stat):
            with pytest.raises(FileNotFoundError, match=r"s3://"):
                act()


def test_looking_about_costs_one_listing_a_folder(s3: ObjectStore, folder: RemotePath) -> None:
    for name in ("a", "b", "c"):
        s3.put(f"run/{name}", b"x")
    s3.forget()
    for _ in range(3):
        assert (folder / "a").is_file() and (folder / "b").exists() and not (folder / "d").exists()
        assert (folder / "c").stat().st_size == 1
    assert s3.by_method() == {"GET": 1}
    (folder / "d").write_bytes(b"new")
    assert (folder / "d").stat().st_size == 3  # what is written here is known at once
    s3.put("run/e", b"x")
    assert not (folder / "e").exists()
    folder.refresh()
    assert (folder / "e").exists()


def test_a_stream_appears_when_it_is_closed(s3: ObjectStore, folder: RemotePath) -> None:
    data = os.urandom(2 * remote.PART_BYTES + 12345)
    file = UploadedFile(folder / "large", len(data))
    for start in range(0, len(data), 1_000_003):
        file.write(data[start : start + 1_000_003])
    assert s3.names("run/") == []
    file.close()
    assert s3.get("run/large") == data and s3.open_uploads() == []
    small = UploadedFile(folder / "small", 3)
    small.write(b"abc")
    small.close()
    assert s3.get("run/small") == b"abc"
    broken = UploadedFile(folder / "broken", 0)
    broken.write(data)
    broken.discard()
    assert s3.open_uploads() == [] and s3.names("run/") == ["large", "small"]


@pytest.mark.usefixtures("in_full")
def test_parts_are_as_large_as_s3_wants_them(
    s3: ObjectStore, folder: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(2 * remote.PART_BYTES + 1)
    (tmp_path / "up").write_bytes(data)
    (folder / "x").upload_file(tmp_path / "up")
    copy_file(folder / "x", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data
    file = UploadedFile(folder / "y", len(data))
    file.write(data)
    file.close()
    monkeypatch.setattr(remote, "_MAX_COPY", 0)
    (folder / "x").copy_to(folder / "z")
    assert s3.get("run/x") == s3.get("run/y") == s3.get("run/z") == data
    for name in ("x", "y", "z"):
        assert s3.count("PUT", f"run/{name}", "partNumber") == 3
    assert remote.part_bytes(1 << 40) > (1 << 40) / 10_000


def test_a_tree_is_removed_with_its_open_uploads(s3: ObjectStore, folder: RemotePath) -> None:
    for number in range(1005):  # more than one request deletes
        s3.put(f"run/{number}", b"")
    s3.put("run-2/stays", b"")
    left = UploadedFile(folder / "left" / "open", 0)
    left.write(os.urandom(remote.PART_BYTES + 1))
    while not s3.open_uploads():
        time.sleep(0.01)
    remove_folder(folder)
    assert s3.names() == ["run-2/stays"] and s3.open_uploads() == []
    remove_folder(folder)  # nothing there is no error


def test_what_is_gone_already_does_not_stop_a_deletion(
    s3: ObjectStore, folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's store ends a deletion of several at the first that is missing; here it is pretended to."""
    delete = obstore.delete

    def one_by_one(store: Any, keys: list[str]) -> None:
        if len(keys) > 1 or "gone" in keys[0]:
            raise FileNotFoundError(keys[0])
        delete(store, keys)

    monkeypatch.setattr(obstore, "delete", one_by_one)
    for name in ("a", "b"):
        (folder / name).write_bytes(b"x")
    folder.remove(["gone", "a", "b"])
    assert not {"a", "b"} & folder.objects().keys()


def test_markers_tell_what_is_whole(s3: ObjectStore, folder: RemotePath) -> None:
    assert not (folder / completion.COMPLETE).is_file() and not is_unfinished(folder)
    token = completion.begin(folder)
    assert is_unfinished(folder) and s3.names("run/") == ["_INCOMPLETE"]
    completion.complete(folder, token, step=3)
    assert (folder / completion.COMPLETE).is_file() and s3.names("run/") == ["_COMPLETE"]
    first, second = completion.begin(folder), completion.begin(folder)
    with pytest.raises(RemoteError, match="another process"):
        completion.complete(folder, first)
    assert is_unfinished(folder)
    completion.complete(folder, second)
    assert (folder / completion.COMPLETE).is_file()


def test_silence_is_a_failure(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.01")
    monkeypatch.setenv("PORTABLE_STORAGE_TIMEOUT", "0.3")
    s3.put("run/x", b"x")
    s3.fail(delay=1.5)
    started = time.monotonic()
    with pytest.raises(RetriesUsedUpError, match=r"cannot read, \d attempts failed"):
        RemotePath.of(s3.url("run/x")).read_bytes()
    assert time.monotonic() - started < 10


def test_what_will_not_pass_is_tried_once(s3: ObjectStore, folder: RemotePath) -> None:
    s3.put("run/x", b"x")
    s3.fail(status=403)
    s3.forget()
    with pytest.raises(AccessDeniedError, match=r"run/x: access denied, these credentials may not read here"):
        (folder / "x").read_bytes()
    for act in (lambda: (folder / "x").write_bytes(b""), lambda: list(folder.iterdir()), folder.exists):
        with pytest.raises(AccessDeniedError, match="access denied"):
            act()
    assert s3.count() == 4


def test_a_missing_bucket_is_named(s3: ObjectStore) -> None:
    nowhere = RemotePath.of("s3://no-such-bucket-here/run")
    for act in (
        nowhere.exists,
        nowhere.iterdir,
        lambda: nowhere.write_bytes(b""),
        lambda: UploadedFile(nowhere / "x", 0).close(),
        lambda: completion.begin(nowhere),
    ):
        with pytest.raises(RemoteError, match=r"s3://no-such-bucket-here/run.*: there is no such bucket"):
            act()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/a\\b", "is refused"),
        ("s3://bucket/a\tb", "is refused"),
        ("az://me@bucket/x", "credentials do not belong"),
        ("memory://run", "no object store"),
        ("https://host/run", "neither listed"),
        ("s3://key:hidden-password@bucket/run", "credentials do not belong"),
        ("s3://bucket/run?X-Amz-Signature=hidden-password", "leave out the query"),
        ("simplecache::s3://bucket/run", "no object store"),
        ("s3://", "names no bucket"),
        ("s3://bucket/../x", "not supported in a URL"),
        ("nonsense://bucket/x", "nonsense:// is no object store"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as raised:
        RemotePath.of(url)
    assert "hidden-password" not in str(raised.value)


@pytest.mark.parametrize("name", ["a/../b", "a//b", "a/./b", "a\\b", "x\ty", "/lead"])
def test_odd_names_of_objects_are_refused(
    name: str, s3: ObjectStore, folder: RemotePath, tmp_path: Path
) -> None:
    """Whoever owns a bucket could otherwise write anywhere on the disk that it is copied to."""
    s3.put(f"run/{name}", b"evil")
    for act in (
        folder.objects,
        lambda: copy_folder(folder, tmp_path / "copy"),
        lambda: matching(folder / "**" / "*"),
        lambda: [list(path.iterdir()) for path in (folder, folder / "a") if path.exists()],
    ):
        with pytest.raises(RemoteError, match=r"rename that object or delete it"):
            act()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    if name == "a\\b":  # beside others obstore lists nothing
        s3.put("run/good.txt", b"")
        assert [*matching(folder / "*.txt")] == [*matching(folder / "**" / "*.txt")] == [folder / "good.txt"]
    if name != "/lead":
        with pytest.raises(RemoteError):
            folder / name.replace("//", "/../").replace("/./", "/../")


def test_empty_objects_for_folders_are_none(s3: ObjectStore, folder: RemotePath) -> None:
    """As consoles make them."""
    for name in ("run/", "run/sub/", "run/sub/x"):
        s3.put(name, b"" if name.endswith("/") else b"x")
    assert list(folder.objects()) == ["sub/x"] and [path.name for path in folder.iterdir()] == ["sub"]
    assert (folder / "sub").is_dir()


def test_conditional_writes(s3: ObjectStore, folder: RemotePath) -> None:
    first = (folder / "x").write_bytes(b"1", replacing="")
    with pytest.raises(ConflictError):
        (folder / "x").write_bytes(b"2", replacing="")
    second = (folder / "x").write_bytes(b"2", replacing=first)
    with pytest.raises(ConflictError):
        (folder / "x").write_bytes(b"3", replacing=first)
    assert (folder / "x").read_versioned() == (b"2", second)


def test_a_fork_of_a_process_that_used_a_store_is_told(s3: ObjectStore, folder: RemotePath) -> None:
    """Where it would hang, also for a range that the parent is fetching."""
    (folder / "x").write_bytes(bytes(1 << 20))
    file = RemoteFile("x", folder / "x", 1 << 20)
    s3.fail(method="GET", key="x", delay=0.5)
    fetching = threading.Thread(target=file.read, args=(0, 10))
    fetching.start()
    while not file.runs:
        time.sleep(0.01)
    for use in (RemotePath.of(s3.url("run")).exists, lambda: file.read(0, 10)):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            signal.alarm(10)
            try:
                use()
            except BaseException as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        assert b"start it with spawn or forkserver" in os.read(reading, 1000)
    fetching.join()
    s3.heal()


def test_ctrl_c_does_not_wait_for_a_store(s3: ObjectStore, folder: RemotePath) -> None:
    s3.fail(status=503)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        folder.exists()
    assert time.monotonic() - started < 5
    s3.heal()


def test_a_copy_between_buckets_is_of_one_version(s3: ObjectStore, folder: RemotePath) -> None:
    s3.put("run/x", data := bytes(range(256)) * 32768)
    s3._backend.create_bucket(other := f"{s3.bucket}-other", "us-east-1")
    fault = s3.fail(method="PUT", key=f"{other}/x", delay=0.3)
    copying = threading.Thread(target=(folder / "x").copy_to, args=(RemotePath.of(f"s3://{other}/x"),))
    copying.start()
    wait_for(lambda: fault.done)
    s3.put("run/x", data[::-1])
    copying.join()
    s3.heal()
    assert RemotePath.of(f"s3://{other}/x").read_bytes() == data


def test_runs_are_evicted_in_the_order_of_their_use(
    s3: ObjectStore, folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, nbytes in (("CACHE", 3000), ("RUN", 1000), ("DATA", 1000), ("HEADER", 1000)):
        monkeypatch.setattr(range_reader, f"{name}_BYTES", nbytes)
    s3.put("run/x", data := bytes(range(256)) * 40)
    file = RemoteFile("x", folder / "x", len(data))
    for start in (5000, 0, 2000, 5500, 8000, 0, 2000, 5000):
        read = bytearray(800 if start == 5500 else 200)
        file.read_into(memoryview(read), start, start + len(read), len(data))
        assert read == data[start : start + len(read)]


def test_secrets_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_STORAGE_TOKEN", "abcdef123456")
    for text in (
        "s3://user:abcdef@bucket/x",
        "https://h/x?X-Amz-Signature=abcdef&y=1",
        "{'secret': 'abcdef', 'key': 1}",
        "aws_secret_access_key=abcdef, next",
        "said abcdef123456 aloud",
    ):
        assert "abcdef" not in redact(text) and "***" in redact(text)
    assert redact("s3://bucket/run: plain") == "s3://bucket/run: plain"


def test_one_store_by_two_names(s3: ObjectStore) -> None:
    one, other = (RemotePath.of(s3.url("run").replace("s3:", protocol)) for protocol in ("s3:", "s3a:"))
    assert one == other and hash(one) == hash(other)
    assert str(other) == str(one).replace("s3:", "s3a:"), "as a run's fingerprint names it"
    assert (other / "out").is_relative_to(one) and not one.is_relative_to(other / "out")


# -- credentials, endpoints and regions, from where the vendors' own tools take them -------------------------


KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
PROFILE = """\
[profile work]
endpoint_url = {endpoint}
region = eu-central-1
[profile sso]
sso_start_url = https://nowhere.invalid/start
sso_region = eu-central-1
sso_account_id = 123456789012
sso_role_name = reader
[profile empty]
"""


@pytest.fixture
def no_keys(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without keys in the environment, whose home is empty."""
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(credentials, "_reachable", lambda protocol: False)


@pytest.fixture
def signed(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the requests were signed."""
    found: list[str] = []
    forward = s3.forward

    def note(method: str, path: str, headers: Any, body: bytes) -> Any:
        found.append({name.lower(): value for name, value in headers.items()}.get("authorization", ""))
        return forward(method, path, headers, body)

    monkeypatch.setattr(s3, "forward", note)
    return found


def said(url: str) -> str:
    with pytest.raises(RemoteError) as raised:
        RemotePath.of(url).exists()
    assert "\n" not in str(raised.value) and str(raised.value).startswith(url)
    return str(raised.value)


def test_a_profile_of_the_aws_tools(
    s3: ObjectStore, no_keys: None, signed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text(PROFILE.format(endpoint=s3.environment["AWS_ENDPOINT_URL"]))
    (tmp_path / ".aws/credentials").write_text(
        "[work]\naws_access_key_id = AKIAOFTHEPROFILE0001\naws_secret_access_key = of-the-profile\n"
    )
    for name in ("AWS_ENDPOINT_URL", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert not RemotePath.of(s3.url("x")).exists()
    assert "AKIAOFTHEPROFILE0001" in signed[-1] and "/eu-central-1/s3/" in signed[-1]
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "AWS_PROFILE and ~/.aws" in (line := said(s3.url("x"))) and "nobody" in line
    monkeypatch.setenv("AWS_PROFILE", "sso")
    assert "no credentials found (looked for AWS_ACCESS_KEY_ID" in (line := said(s3.url("x")))
    assert "SSO" in line
    monkeypatch.setenv("AWS_PROFILE", "empty")
    assert "no credentials found" in said(s3.url("x"))
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert "pip install 'portable-trainer[s3]'" in said(s3.url("x"))


def test_what_cannot_be_set_up_is_told(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing.pem"))
    assert "cannot be set up" in (line := said(s3.url("x"))) and "missing.pem" in line


def test_unsigned_requests(
    s3: ObjectStore, no_keys: None, signed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    RemotePath.of(s3.url("x")).exists()
    assert signed[-1] == ""


def test_expired_ones_are_told(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    monkeypatch.setattr(s3, "forward", lambda *_: (400, [], body))
    assert "the credentials have expired; renew them (looked for AWS_ACCESS_KEY_ID" in said(s3.url("x"))


def test_googles_default_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr(credentials, "_reachable", lambda protocol: False)
    assert "looked for GOOGLE_APPLICATION_CREDENTIALS, gcloud auth" in said("gs://bucket/x")
    file = tmp_path / "application_default_credentials.json"
    for kind in ("authorized_user", "service_account"):
        file.write_text(json.dumps({"type": kind}))
        assert OPTIONS["gs"]("bucket") == {"application_credentials": str(file)}
    file.write_text('{"type": "external_account"}')
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(RemoteError, match=r"pip install 'portable-trainer\[gcs\]'"):
        OPTIONS["gs"]("bucket")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    assert "missing.json: holds no Google credentials" in said("gs://bucket/x")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:1")
    assert OPTIONS["gs"]("b") == {"base_url": "http://localhost:1", "skip_signature": True}


def test_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    assert "names no storage account; set AZURE_STORAGE_ACCOUNT_NAME" in said("az://container/x")
    url = "abfss://container@someone.dfs.core.windows.net/x"
    assert str(RemotePath.of(url)) == url
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(RemoteError, match=r"pip install 'portable-trainer\[azure\]'"):
        OPTIONS["az"]("container@someone.dfs.core.windows.net")
    text = "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=a2V5a2V5==;EndpointSuffix=a.b"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    known = {"account_name": "me", "account_key": "a2V5a2V5=="}
    assert OPTIONS["az"]("container") == known
    assert OPTIONS["az"]("container@someone.dfs.core.windows.net") == {"account_key": "a2V5a2V5=="}
