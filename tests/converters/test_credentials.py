"""Credentials, endpoints and regions of object stores: from where the vendors' own tools take them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from converters.storage import credentials
from converters.storage.credentials import OPTIONS
from converters.storage.object_store import RemotePath
from converters.storage.store_errors import RemoteError
from tests.object_store import ObjectStore

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


@pytest.mark.parametrize(
    ("kind", "native"), [("authorized_user", True), ("service_account", True), ("external_account", False)]
)
def test_googles_default_credentials(
    kind: str, native: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    file = tmp_path / "application_default_credentials.json"
    file.write_text(json.dumps({"type": kind}))
    if native:
        assert OPTIONS["gs"]("bucket") == {"application_credentials": str(file)}
        return
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(RemoteError, match=r"pip install 'portable-trainer\[gcs\]'"):
        OPTIONS["gs"]("bucket")


def test_google_without_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr(credentials, "_reachable", lambda protocol: False)
    assert "looked for GOOGLE_APPLICATION_CREDENTIALS, gcloud auth" in said("gs://bucket/x")
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
