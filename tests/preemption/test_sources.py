"""Notices by signals, by files, by the metadata server, and by other ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from resiliency.preemption.board import Board, own_connection
from resiliency.preemption.notice import Notice
from resiliency.preemption.signals import Signals
from resiliency.preemption.sources import FileSource, MetadataSource
from tests.metadata_server import Metadata, metadata_server  # noqa: F401 - a fixture
from tests.ports import free_port

SOON_S = 20.0
NOTICE = Notice(source="SIGTERM", rank=1, grace_s=25.0, signal=15)


class Told:
    def __init__(self) -> None:
        self.all: list[Any] = []
        self._changed = threading.Condition()

    def __call__(self, one: Any) -> None:
        with self._changed:
            self.all.append(one)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= count, SOON_S)
            return self.all


# ---- signals


def test_a_signal_is_told_while_the_main_thread_is_in_native_code(tmp_path: Path) -> None:
    """There Python runs no handler."""
    script = """
import ctypes, os, signal, threading
from resiliency.preemption.signals import Signals

def told(number):
    os.write(1, b"told %d" % number)
    os._exit(0)

signals = Signals([signal.SIGTERM], told)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # the second time it waits for itself for ever, and no signal ends that
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert done.stdout == b"told 15", done.stderr


def test_what_was_there_comes_back_and_gets_what_it_did() -> None:
    told, reader, writer = Told(), *socket.socketpair()
    writer.setblocking(False)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    other = signal.getsignal(signal.SIGUSR1)
    try:
        seen: list[int] = []
        signals = Signals([signal.SIGUSR1], told, lambda number, frame: seen.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert told.wait() == [signal.SIGUSR1] and seen == [signal.SIGUSR1]
        reader.settimeout(SOON_S)
        assert reader.recv(1) == bytes([signal.SIGUSR1])
        signals.close()
        signals.close()
        assert signal.getsignal(signal.SIGUSR1) is other
        assert signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False) == writer.fileno()
    finally:
        signal.set_wakeup_fd(fd)
        signal.signal(signal.SIGUSR1, before)
        reader.close()
        writer.close()


def test_a_handler_that_somebody_has_set_since_stays() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        signals = Signals([signal.SIGUSR1], Told())
        mine = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert mine is not signal.SIG_IGN
        signals.close()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("handler", "code"), [(None, -signal.SIGUSR1), (lambda *_: os._exit(7), 7)])
def test_a_forked_child_has_its_own_handlers_and_tells_nobody(handler: Any, code: int) -> None:
    told = Told()
    signals = Signals([signal.SIGUSR1], told, in_children={signal.SIGUSR1: handler})
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        os.kill(os.getpid(), signal.SIGUSR1)
        assert told.wait() == [signal.SIGUSR1]
    finally:
        signals.close()


# ---- files and the metadata server


def test_a_file_is_told_once_and_closing_ends_the_looking(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "notice"
    source = FileSource(str(path), told)
    path.touch()
    assert told.wait() == [f"the file {path}"]
    source.close()
    other = FileSource(str(tmp_path / "never"), told)
    other.close()
    assert len(told.all) == 1 and not other._thread.is_alive()


@pytest.mark.parametrize(
    ("key", "value"), [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")]
)
def test_the_metadata_server_tells_at_once(key: str, value: str, metadata: Metadata) -> None:
    told = Told()
    source = MetadataSource(metadata.address, told)
    try:
        metadata.set(key, value)
        assert told.wait() == [f"the metadata server, {key}={value}"]
        assert all("wait_for_change=true" in path for path in metadata.asked)
    finally:
        source.close()
    assert not any(thread.is_alive() for thread in source._threads)


def test_a_metadata_server_that_fails_is_said_once(
    metadata: Metadata, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resiliency.preemption.sources._PAUSE_S", 0.01)
    metadata.fails = True
    told = Told()
    source = MetadataSource(metadata.address, told)
    try:
        while len(metadata.asked) < 8:
            threading.Event().wait(0.01)
        metadata.fails = False
        metadata.set("preempted", "TRUE")
        told.wait()
    finally:
        source.close()
    said = [record.message for record in caplog.records if "does not answer" in record.message]
    assert len(said) == 2 and all(any(f"instance/{key} " in each for each in said) for key in metadata.values)


def test_a_key_that_a_metadata_server_does_not_have_is_said_once_while_the_other_answers(
    metadata: Metadata, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GKE's."""
    monkeypatch.setattr("resiliency.preemption.sources._PAUSE_S", 0.01)
    monkeypatch.setattr("resiliency.preemption.sources._LOOK_EVERY_S", 0.01)
    metadata.statuses["preempted"] = 404
    told = Told()
    source = MetadataSource(metadata.address, told)
    try:
        for at in range(4):
            before = len([path for path in metadata.asked if "/preempted" in path])
            metadata.set("maintenance-event", ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")[at % 2])
            while len([path for path in metadata.asked if "/preempted" in path]) < before + 4:
                threading.Event().wait(0.01)
        assert told.all == []
        metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        assert told.wait() == ["the metadata server, maintenance-event=TERMINATE_ON_HOST_MAINTENANCE"]
    finally:
        source.close()
    (said,) = [record.message for record in caplog.records if "does not answer" in record.message]
    assert "instance/preempted" in said and "404" in said


# ---- other ranks


@pytest.fixture
def store() -> Iterator[Any]:
    yield dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)


def boards(store: Any, told: list[Told]) -> list[Board]:
    prefixed = dist.PrefixStore("default_pg", store)
    return [Board(prefixed, prefix="p", rank=rank, world_size=len(told), told=one) for rank, one in enumerate(told)]


def test_all_other_ranks_hear_of_a_notice(store: Any) -> None:
    told = [Told(), Told(), Told()]
    made = boards(store, told)
    made[1].announce(NOTICE)
    assert told[0].wait() == told[2].wait() == [NOTICE] and told[1].all == []
    for board in made:
        board.close()
        assert not board._thread.is_alive()


def test_a_board_that_is_closed_tells_nothing(store: Any) -> None:
    told = [Told(), Told()]
    made = boards(store, told)
    made[0].close()
    made[1].announce(NOTICE)
    made[1].close()
    assert told[0].all == [] and not made[0]._thread.is_alive()


def test_a_wait_on_an_own_connection_holds_up_nobody(store: Any) -> None:
    prefixed = dist.PrefixStore("default_pg", store)
    waiting = own_connection(prefixed)
    thread = threading.Thread(target=lambda: waiting.wait(["key"], timedelta(seconds=SOON_S)))
    thread.start()
    prefixed.set("key", "value")  # returns, and ends the wait
    thread.join(SOON_S)
    assert not thread.is_alive()
