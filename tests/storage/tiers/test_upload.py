"""Streamed uploads on fsspec's own buffered file, without a store."""

from __future__ import annotations

from typing import Any

import pytest
from fsspec.spec import AbstractBufferedFile

from resiliency.storage.tiers._failures import SessionLost
from resiliency.storage.tiers._upload import Upload


class Handle(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """Sends to a list; fails as told. Holds a view of its buffer while it sends, as gcsfs does."""

    def __init__(self, errors: list[Exception | None]) -> None:
        super().__init__(None, "bucket/key", "wb", block_size=10)
        self.errors = errors
        self.begun = 0
        self.parts: list[bytes] = []
        self.finished = 0
        self.discarded = 0

    def _next(self) -> None:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error

    def _initiate_upload(self) -> None:
        self._next()
        self.begun += 1

    def _upload_chunk(self, final: bool = False) -> bool:
        view = self.buffer.getbuffer()
        self._next()
        self.parts.append(bytes(view))
        self.finished += final
        return True

    def discard(self) -> None:
        self.discarded += 1


def until_done(call: Any) -> int:
    """Calls until it returns; how often it raised."""
    failures = 0
    while True:
        try:
            call()
            return failures
        except ConnectionError:
            failures += 1


def test_parts_are_sent_when_full_and_the_rest_at_the_end() -> None:
    handle = Handle([])
    upload = Upload(handle)
    for block in (b"12345", b"67890abc", b"d", b"e"):
        upload.add(block)
        upload.send()
    assert (handle.begun, handle.parts, handle.finished) == (1, [b"1234567890abc"], 0)
    upload.finish()
    assert (handle.parts, handle.finished, handle.closed) == ([b"1234567890abc", b"de"], 1, True)


def test_every_step_can_be_repeated_and_loses_and_doubles_nothing() -> None:
    lost = [ConnectionError(), ConnectionError(), None, ConnectionError(), None, ConnectionError()]
    handle = Handle([*lost])
    upload = Upload(handle)
    upload.add(b"0123456789")
    assert until_done(upload.send) == 3  # two to begin, one to send
    upload.add(b"rest")
    assert until_done(upload.finish) == 1
    assert (handle.begun, handle.parts, handle.finished, handle.closed) == (1, [b"0123456789", b"rest"], 1, True)


def test_a_failed_send_leaves_no_view_of_the_buffer() -> None:
    """A buffer that is viewed cannot grow, and complains on stderr when it goes."""
    handle = Handle([None, ConnectionError()])
    upload = Upload(handle)
    upload.add(b"0123456789")
    with pytest.raises(ConnectionError) as caught:
        upload.send()
    upload.add(b"more")
    upload.send()
    assert handle.parts == [b"0123456789more"]
    del caught


@pytest.mark.parametrize(
    "error", [FileNotFoundError("gone"), AssertionError("no range"), type("E", (Exception,), {"code": 410})()]
)
def test_a_lost_session_is_told_apart_from_a_missing_bucket(error: Exception) -> None:
    upload = Upload(Handle([None, error]))
    upload.add(b"0123456789")
    with pytest.raises(SessionLost):
        upload.send()
    upload = Upload(Handle([error]))
    upload.add(b"0123456789")
    with pytest.raises(type(error)):
        upload.send()


def test_an_abort_closes_and_cancels_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle([])
    upload = Upload(handle)
    upload.add(b"0123456789")
    upload.abort()
    assert handle.closed and handle.discarded == 1
    monkeypatch.setattr(Handle, "discard", lambda self: 1 / 0)
    handle = Handle([])
    Upload(handle).abort()
    assert handle.closed
