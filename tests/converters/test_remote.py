"""The layer over object stores, with a real S3 server and real failures, and credentials."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import obstore
import pytest

from portable.converters.config_and_tokenizer_files import _read_sentence_modules
from portable.converters.errors import CheckpointError, redact_credentials
from portable.converters.storage import completion_markers as completion
from portable.converters.storage import credentials
from portable.converters.storage import object_store as remote
from portable.converters.storage.credentials import OPTION_BUILDERS
from portable.converters.storage.folder_operations import (
    copy_file,
    copy_folder,
    is_incomplete_folder,
    remove_folder,
)
from portable.converters.storage.object_store import RemotePath, find_matching_objects
from portable.converters.storage.safe_open import header_contains
from portable.converters.storage.store_errors import RemoteError, RetriesExhaustedError, format_store_error
from portable.converters.writers.store_output import FileUpload
from tests.object_store import ObjectStore, scale_down


@pytest.fixture(autouse=True)
def in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_down(monkeypatch)


@pytest.fixture
def folder(s3: ObjectStore) -> RemotePath:
    return RemotePath.from_url(s3.url("run"))


def test_remote_copy_of_large_object_uses_parts(
    s3: ObjectStore, folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("run/x", data := os.urandom(2 * remote.PART_BYTES + 1))
    monkeypatch.setattr(remote, "_MAX_COPY", 0)
    (folder / "x").copy_to(folder / "z")
    assert s3.get("run/z") == data and s3.count("PUT", "run/z", "partNumber") == 3
    assert remote.compute_part_bytes(1 << 40) > (1 << 40) / 10_000


def test_remove_folder_removes_objects_and_open_uploads(s3: ObjectStore, folder: RemotePath) -> None:
    for number in range(1005):  # more than one request deletes
        s3.put(f"run/{number}", b"")
    s3.put("run-2/stays", b"")
    left = FileUpload(folder / "left" / "open", 0)
    left.write(os.urandom(remote.PART_BYTES + 1))
    while not s3.open_uploads():
        time.sleep(0.01)
    remove_folder(folder)
    assert s3.names() == ["run-2/stays"] and s3.open_uploads() == []
    remove_folder(folder)  # nothing there is no error


def test_remove_objects_ignores_missing_objects(
    s3: ObjectStore, folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's store ends a batch deletion at the first missing object, which is imitated here."""
    delete = obstore.delete

    def one_by_one(store: Any, keys: list[str]) -> None:
        if len(keys) > 1 or "gone" in keys[0]:
            raise FileNotFoundError(keys[0])
        delete(store, keys)

    monkeypatch.setattr(obstore, "delete", one_by_one)
    for name in ("a", "b"):
        (folder / name).write_bytes(b"x")
    folder.remove_objects(["gone", "a", "b"])
    assert not {"a", "b"} & folder.list_objects().keys()


def test_folder_markers_show_completeness(s3: ObjectStore, folder: RemotePath) -> None:
    assert not (folder / completion.COMPLETE_MARKER).is_file() and not is_incomplete_folder(folder)
    token = completion.mark_folder_incomplete(folder)
    assert is_incomplete_folder(folder) and s3.names("run/") == ["_INCOMPLETE"]
    completion.mark_folder_complete(folder, token, step=3)
    assert (folder / completion.COMPLETE_MARKER).is_file() and s3.names("run/") == ["_COMPLETE"]
    first, second = completion.mark_folder_incomplete(folder), completion.mark_folder_incomplete(folder)
    with pytest.raises(RemoteError, match="another process"):
        completion.mark_folder_complete(folder, first)
    assert is_incomplete_folder(folder)
    completion.mark_folder_complete(folder, second)
    assert (folder / completion.COMPLETE_MARKER).is_file()


@pytest.mark.parametrize(
    "read",
    [
        lambda path: header_contains(path / "modules.json", b"[]"),
        lambda path: _read_sentence_modules(path / "modules.json", path),
    ],
    ids=["header_contains", "_read_sentence_modules"],
)
def test_outage_is_not_mistaken_for_missing_content(
    read: Callable[[RemotePath], object],
    s3: ObjectStore,
    folder: RemotePath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.002")
    (folder / "modules.json").write_bytes(b"[]")
    assert not read(folder / "missing")
    s3.fail(drop=True, method="GET", key="modules.json")
    with pytest.raises(RetriesExhaustedError):
        read(folder)


@pytest.mark.parametrize("find", ["integrity.find_model_problems", "inspect_and_diff._describe_adapter"])
def test_outage_is_not_mistaken_for_damaged_adapter(find: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module_name, _, name = find.partition(".")
    module = importlib.import_module(f"portable.converters.{module_name}")
    outage = RetriesExhaustedError("s3://b/a: the store is away; run the command again")
    monkeypatch.setattr(module, "find_adapter", Mock(side_effect=outage))
    with pytest.raises(RetriesExhaustedError):
        getattr(module, name)(Mock(tensors={}))


def test_remote_read_times_out(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.01")
    monkeypatch.setenv("PORTABLE_STORAGE_TIMEOUT", "0.3")
    s3.put("run/x", b"x")
    s3.fail(delay=1.5)
    started = time.monotonic()
    with pytest.raises(RetriesExhaustedError, match=r"cannot read, because \d attempts? failed"):
        RemotePath.from_url(s3.url("run/x")).read_bytes()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/a\\b", "has an empty component"),
        ("az://me@bucket/x", "credentials are not allowed"),
        ("memory://run", "not a supported object store"),
        ("s3://key:hidden-password@bucket/run", "credentials are not allowed"),
        (
            "s3://bucket/run?X-Amz-Signature=hidden-password",
            "remove the question mark and everything after it",
        ),
        ("s3://", "contains no bucket"),
    ],
)
def test_remote_path_rejects_bad_urls(url: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as raised:
        RemotePath.from_url(url)
    assert "hidden-password" not in str(raised.value)


@pytest.mark.parametrize("name", ["a/../b", "a//b", "a/./b", "a\\b", "x\ty", "/lead"])
def test_remote_path_rejects_unsafe_object_names(
    name: str, s3: ObjectStore, folder: RemotePath, tmp_path: Path
) -> None:
    """Otherwise, the owner of a bucket could write anywhere on the disk to which it is copied."""
    s3.put(f"run/{name}", b"evil")
    for act in (
        folder.list_objects,
        lambda: copy_folder(folder, tmp_path / "copy"),
        lambda: find_matching_objects(folder / "**" / "*"),
        lambda: [list(path.iterdir()) for path in (folder, folder / "a") if path.exists()],
    ):
        with pytest.raises(RemoteError, match=r"rename or delete the object"):
            act()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    if name == "a\\b":  # in addition to other objects, obstore does not list it
        s3.put("run/good.txt", b"")
        assert (
            [*find_matching_objects(folder / "*.txt")]
            == [*find_matching_objects(folder / "**" / "*.txt")]
            == [folder / "good.txt"]
        )
    if name != "/lead":
        with pytest.raises(RemoteError):
            folder / name.replace("//", "/../").replace("/./", "/../")


def test_remote_path_ignores_empty_folder_objects(s3: ObjectStore, folder: RemotePath) -> None:
    """Web consoles of stores create such objects."""
    for name in ("run/", "run/sub/", "run/sub/x"):
        s3.put(name, b"" if name.endswith("/") else b"x")
    assert list(folder.list_objects()) == ["sub/x"] and [path.name for path in folder.iterdir()] == ["sub"]
    assert (folder / "sub").is_dir()
    s3.put("run/sub", b"")  # some programs omit the slash
    s3.put("run/empty.txt", b"")
    assert list(folder.list_objects()) == ["empty.txt", "sub/x"]
    bucket = RemotePath.from_url(f"s3://{s3.bucket}")
    for path, matches in (
        (folder / "*", [folder / "empty.txt"]),
        (folder / "empty.txt", [folder / "empty.txt"]),
        (folder / "sub", []),
        (bucket, []),
    ):
        assert list(find_matching_objects(path)) == matches


def test_remote_move_to_same_path_keeps_object(s3: ObjectStore, folder: RemotePath) -> None:
    s3.put("run/x", b"x")
    (folder / "x").move_to(folder / "x")
    assert s3.get("run/x") == b"x"
    (folder / "x").move_to(folder / "y")
    assert s3.names("run/") == ["y"]


def test_remote_download_passes_on_errors_of_local_file(
    s3: ObjectStore, folder: RemotePath, tmp_path: Path
) -> None:
    s3.put("run/x", data := os.urandom(2 * remote.PART_BYTES + 1))
    full_disk = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError) as raised:
        (folder / "x").download_to(Mock(side_effect=[None, full_disk]))
    assert raised.value is full_disk
    copy_file(folder / "x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == data


OPERATIONS: dict[str, Any] = {
    "list": lambda folder, _: sorted(folder.list_objects()) == ["x", "y"],
    "list of a folder": lambda folder, _: sorted(path.name for path in folder.iterdir()) == ["x", "y"],
    "size": lambda folder, _: (folder / "x").get_file_size() == 1000,
    "read": lambda folder, _: (folder / "x").read_bytes() == b"x" * 1000,
    "read of a range": lambda folder, _: (folder / "x").read_range(500, 600) == b"x" * 100,
    "write": lambda folder, _: (folder / "z").write_bytes(b"z"),
    "copy": lambda folder, _: (
        (folder / "x").copy_to(folder / "z") or folder.list_objects()["z"].size_bytes == 1000
    ),
    "deletion": lambda folder, _: folder.remove_objects(["x"]) or list(folder.list_objects()) == ["y"],
    "upload": lambda folder, file: (
        (folder / "z").upload_file(file) or folder.list_objects()["z"].size_bytes > 1 << 20
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_remote_operation_is_retried_after_truncated_response(
    name: str, s3: ObjectStore, folder: RemotePath, tmp_path: Path
) -> None:
    for key in ("run/x", "run/y"):
        s3.put(key, key[-1:].encode() * 1000)
    (tmp_path / "large").write_bytes(bytes(5 * remote.PART_BYTES))
    s3.fail(cut=True, times=1)
    assert OPERATIONS[name](folder, tmp_path / "large")


def test_remote_retries_end_on_ctrl_c(s3: ObjectStore, folder: RemotePath) -> None:
    s3.fail(status=503)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        folder.exists()
    assert time.monotonic() - started < 5
    s3.heal()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORTABLE_STORAGE_CONNECTIONS", "inf"),
        ("PORTABLE_STORAGE_TIMEOUT", "inf"),
        ("PORTABLE_STORAGE_MINUTES", "nan"),
        ("PORTABLE_STORAGE_MINUTES", "-1"),
        ("AWS_ENDPOINT_URL", "http://["),  # obstore would panic
        ("AWS_ENDPOINT_URL", "http://[::1"),
        ("AWS_ENDPOINT_URL", "http://\x7f"),
        ("AWS_ENDPOINT_URL_S3", "["),
        ("AWS_ENDPOINT_URL", "https://me:hidden-password@127.0.0.1:9"),
    ],
)
def test_remote_rejects_invalid_environment_in_one_line(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for key in KEYS:
        monkeypatch.setenv(key, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError) as refused:
        remote.get_max_connections()
        RemotePath.from_url("s3://bucket/folder").exists()
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)
    assert "hidden-password" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("secret", ["~no-such-user-abcdef", "/" + "abcdef" * 1000])
def test_redact_credentials_removes_secrets_like_paths(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", secret)
    assert redact_credentials(f"said {secret} aloud") == "said *** aloud"


def test_redact_credentials_removes_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_STORAGE_TOKEN", "abcdef123456")
    for text in (
        "s3://user:abcdef@bucket/x",
        "https://h/x?X-Amz-Signature=abcdef&y=1",
        "{'secret': 'abcdef', 'key': 1}",
        "aws_secret_access_key=abcdef, next",
        "said abcdef123456 aloud",
        "loss:Made('hf_abcdefABCDEF1234567890')",
        "loss:Made('sk-abcdefLEAK')",
        "{ghp_abcdefABCDEF1234567890}",
        "hub_token: abcdef1",
        '"TOKEN": "abcdef1"',
        "eyJabcdefghijk.eyJabcdefghijk.abcdef",
    ):
        assert "abcdef" not in redact_credentials(text) and "***" in redact_credentials(text)
    for text in (
        "s3://bucket/run: plain",
        "tokenizer: HuggingFaceTB/SmolLM2-135M",
        "sample_tokens: 1000000",
        "eos_token: </s>",
        "eos_token: <|endoftext|>",
        "sk-learn-of-words and hf_dataset_of_words",
    ):
        assert redact_credentials(text) == text


def test_store_error_redacts_secret_that_is_cut_off() -> None:
    message = format_store_error(Exception("x" * 280 + " https://me:hidden-password@host/a"))
    assert message.endswith("x https://***@host/a")


# -- credentials, endpoints and regions, from where the vendors' own tools take them -------------------------


KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
PROFILE = """\
[profile work]
endpoint_url = {endpoint}
region = eu-central-1
[profile empty]
"""


@pytest.fixture
def no_keys(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make a user without keys in the environment, whose home is empty."""
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(credentials, "_is_metadata_host_reachable", lambda protocol: False)


@pytest.fixture
def signed(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the signatures of all requests."""
    found: list[str] = []
    forward = s3.forward

    def note(method: str, path: str, headers: Any, body: bytes) -> Any:
        found.append({name.lower(): value for name, value in headers.items()}.get("authorization", ""))
        return forward(method, path, headers, body)

    monkeypatch.setattr(s3, "forward", note)
    return found


def said(url: str) -> str:
    with pytest.raises(RemoteError) as raised:
        RemotePath.from_url(url).exists()
    assert "\n" not in str(raised.value) and str(raised.value).startswith(url)
    return str(raised.value)


def test_remote_uses_aws_profile(
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
    assert not RemotePath.from_url(s3.url("x")).exists()
    assert "AKIAOFTHEPROFILE0001" in signed[-1] and "/eu-central-1/s3/" in signed[-1]
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "AWS_PROFILE, ~/.aws and" in (line := said(s3.url("x"))) and "nobody" in line
    monkeypatch.setenv("AWS_PROFILE", "empty")
    assert "no credentials found (looked for AWS_ACCESS_KEY_ID" in said(s3.url("x"))
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert "pip install 'portable-trainer[s3]'" in said(s3.url("x"))


def test_remote_sends_unsigned_requests_on_request(
    s3: ObjectStore, no_keys: None, signed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    RemotePath.from_url(s3.url("x")).exists()
    assert signed[-1] == ""


def test_remote_finds_google_default_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr(credentials, "_is_metadata_host_reachable", lambda protocol: False)
    assert "looked for GOOGLE_APPLICATION_CREDENTIALS, credentials from gcloud auth" in said("gs://bucket/x")
    file = tmp_path / "application_default_credentials.json"
    for kind in ("authorized_user", "service_account"):
        file.write_text(json.dumps({"type": kind}))
        assert OPTION_BUILDERS["gs"]("bucket") == {"application_credentials": str(file)}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:1")
    assert OPTION_BUILDERS["gs"]("b") == {"base_url": "http://localhost:1", "skip_signature": True}


def test_remote_finds_azure_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    assert "the name of the storage account is not set; set AZURE_STORAGE_ACCOUNT_NAME" in said(
        "az://container/x"
    )
    url = "abfss://container@someone.dfs.core.windows.net/x"
    assert str(RemotePath.from_url(url)) == url
    text = "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=a2V5a2V5==;EndpointSuffix=a.b"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    known = {"account_name": "me", "account_key": "a2V5a2V5=="}
    assert OPTION_BUILDERS["az"]("container") == known
    assert OPTION_BUILDERS["az"]("container@someone.dfs.core.windows.net") == {"account_key": "a2V5a2V5=="}
