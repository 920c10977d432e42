"""What each host costs the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import tracemalloc
from asyncio.sslproto import SSLProtocol
from pathlib import Path

import pytest

from tests.certificates import Certificates

from .fake_monitors import leading, settings

HOSTS = 20


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_a_connection_with_tls_takes_no_quarter_of_a_megabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Certificates(tmp_path, "authority")
    cert, key = authority.sign("supervisor", "IP:127.0.0.1")
    monkeypatch.setattr(SSLProtocol, "max_size", 256 * 1024)  # Python's own

    def connected(port: int, open_ones: contextlib.ExitStack) -> None:
        trust = ssl.create_default_context(cafile=authority.ca)
        plain = socket.create_connection(("127.0.0.1", port), timeout=10)
        open_ones.enter_context(trust.wrap_socket(plain, server_hostname="127.0.0.1"))

    async def work() -> None:
        made = settings(tmp_path, tls={"cert": cert, "key": key}, handshake_timeout_s=60.0)
        async with leading(made) as supervisor:
            assert supervisor.address is not None
            with contextlib.ExitStack() as open_ones:
                tracemalloc.start()
                open_ones.callback(tracemalloc.stop)
                for _ in range(HOSTS):
                    await asyncio.to_thread(connected, supervisor.address[1], open_ones)
                took, _ = tracemalloc.get_traced_memory()
            assert took < HOSTS * 128 * 1024

    asyncio.run(asyncio.wait_for(work(), 60))
