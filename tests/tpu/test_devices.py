from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from portable.tpu import device_specs as devices
from portable.tpu.libtpu_flags import ADDED_LIBTPU_FLAGS, LIBTPU_FLAGS_VARIABLE

OWN = [f"--{flag}" for flag in ADDED_LIBTPU_FLAGS]


@pytest.fixture(autouse=True)
def no_tpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PJRT_DEVICE", "TPU_ACCELERATOR_TYPE", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "PCI_DEVICES", tmp_path)


def pci_device(folder: Path, vendor: str, kind: str) -> None:
    device = folder / f"{vendor}:{kind}"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "device").write_text(f"{kind}\n")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Start a metadata server on this machine. Returns the headers of its requests."""
    flavors: list[str | None] = []

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            flavors.append(self.headers.get("Metadata-Flavor"))
            if self.path == "/slow":
                time.sleep(0.5)
            self.send_response(404 if self.path == "/missing" else 200)
            self.end_headers()
            if self.path == "/tpu-env":
                self.wfile.write(b"ZONE: 'us-east5-b'\nACCELERATOR_TYPE: 'v6e-4'\nWORKER_ID: '0'\n")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(devices, "METADATA", f"http://127.0.0.1:{server.server_port}/tpu-env")
    yield flavors
    server.shutdown()
    server.server_close()


def test_get_peak_flops_is_per_device() -> None:
    assert devices.get_peak_flops("v3-8", "bf16") == 61.5e12
    assert devices.get_peak_flops("v6e-8", "fp32") == 153e12
    assert devices.get_peak_flops("v4-8", "fp16") is devices.get_peak_flops("v9z-8", "bf16") is None


def test_detect_accelerator_type_without_tpu_sends_no_request(
    asked: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert devices.detect_accelerator_type() is None
    pci_device(tmp_path, "0x1ae0", "0x0042")  # Google's network card
    pci_device(tmp_path, "0x8086", "0x0063")  # someone else's device of the same number
    (tmp_path / "0000:00:09.0").mkdir()
    assert devices.detect_accelerator_type() is None
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-8")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert devices.detect_accelerator_type() is None
    assert asked == []


def test_detect_accelerator_type_prefers_environment(
    asked: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5p-8")
    assert devices.detect_accelerator_type() == "v5p-8"
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert devices.detect_accelerator_type() is None
    assert asked == []


@pytest.mark.parametrize("kind", ["0x0027", "0x0063"])
def test_detect_accelerator_type_requests_metadata_on_tpu_vm(
    asked: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    pci_device(tmp_path, "0x1ae0", kind)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert devices.detect_accelerator_type() == "v6e-4"
    assert asked == ["Google"]


@pytest.mark.parametrize("path", ["missing", "empty", "slow", "no server"])
def test_detect_accelerator_type_survives_metadata_failure(
    asked: list[str | None], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    there = "http://127.0.0.1:9/" if path == "no server" else devices.METADATA.replace("tpu-env", path)
    monkeypatch.setattr(devices, "METADATA", there)
    monkeypatch.setattr(devices, "METADATA_SECONDS", 0.1)
    assert devices.detect_accelerator_type() is None
    assert asked == ["Google"] * (path != "no server")


def test_backend_auto_selects_tpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from portable.registry import resolve_backend_name

    assert resolve_backend_name("auto") != "xla"
    pci_device(tmp_path, "0x1ae0", "0x006f")
    # An environment has the one or the other: their versions of torch differ.
    assert resolve_backend_name("auto") == ("tpu" if find_spec("torch_tpu") else "xla")
    assert resolve_backend_name("cpu") == "cpu"


@pytest.mark.xla
@pytest.mark.parametrize(
    ("runs_on", "given", "flags"), [("TPU", "--mine=1", ["--mine=1", *OWN]), ("CPU", "", [])]
)
def test_runtime_adds_compiler_flags_on_tpu(
    runs_on: str, given: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from portable.tpu.xla import runtime

    monkeypatch.setenv("PJRT_DEVICE", runs_on)
    monkeypatch.setenv(LIBTPU_FLAGS_VARIABLE, given)
    runtime._import_torch_xla()
    assert os.environ[LIBTPU_FLAGS_VARIABLE].split() == flags
