"""Something odd in place of a file or folder: refused with its name, at once, and what is beside it is not hidden."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent._start import _log_file
from resiliency.checkpoint.arena import Arena
from resiliency.checkpoint.shard_reader import ShardReader
from resiliency.errors import CorruptShard, TierError
from resiliency.events import Event, JsonlSink
from resiliency.storage.attempts import attempt_file, read_attempt, write_attempt
from resiliency.storage.catalog import find_runs, scan, step_folders, step_prefix
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.shared_files import is_ours_alone
from resiliency.storage.step_id import StepId
from resiliency.storage.stock import is_stock
from resiliency.storage.tiers._keys import partial_name
from resiliency.storage.tiers.base import UnreadableFolders
from resiliency.storage.tiers.local import LocalTier, fsync_file

STEP = StepId(7, 1, "0a0b0c")


def _socket(path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener, contextlib.chdir(path.parent):
        listener.bind(path.name)  # a whole path may be too long for a socket


KINDS: dict[str, Callable[[Path], Any]] = {
    "fifo": os.mkfifo,
    "socket": _socket,
    "device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)),  # /dev/zero: a file without an end
    "folder": Path.mkdir,
}


def put(kind: str, path: Path) -> Path:
    """Puts something in place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    return path


def at_once(work: Callable[[], Any]) -> Any:
    """The result of ``work`` or the exception it raises; fails when it has neither after seconds."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # handed back
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert results, "it hangs"
    return results[0]


RECORD = ShardRecord(
    id=STEP, run="r", rank=0, world_size=1, node="n", nbytes=4096, block_bytes=8 << 20, digests=("0" * 16,), plan="p"
)


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_opens_a_file_refuses_what_is_none(kind: str, tmp_path: Path) -> None:
    path = put(kind, tmp_path / "odd")
    tier = LocalTier(tmp_path)
    refused = at_once(lambda: tier.read("odd"))
    if kind == "folder":
        assert isinstance(refused, FileNotFoundError)  # a folder is no object, as in a bucket
    else:
        assert isinstance(refused, TierError) and "stands where a file belongs" in str(refused) and kind in str(refused)
        assert str(path) in str(refused) and not refused.retryable
    assert isinstance(at_once(lambda: tier.read_range("odd", 0, 10)), type(refused))
    assert isinstance(at_once(lambda: tier.put_file("copy", str(path))), TierError)
    error = at_once(lambda: ShardReader(str(path), RECORD))
    assert isinstance(error, CorruptShard) and str(path) in str(error)
    error = at_once(lambda: Arena().open(str(path), 4096))
    assert isinstance(error, TierError)
    assert isinstance(at_once(lambda: fsync_file(str(path))), OSError)
    assert isinstance(at_once(lambda: is_ours_alone(str(path))), OSError)
    assert at_once(lambda: is_stock(str(path))) is True  # not ours, so that nobody reads it
    with at_once(lambda: _log_file(path)) as log:
        assert log.name != str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_attempt_file_is_no_attempt(kind: str, tmp_path: Path) -> None:
    put(kind, Path(attempt_file(str(tmp_path))))
    assert at_once(lambda: read_attempt(str(tmp_path))) == 0
    wrote = at_once(lambda: write_attempt(str(tmp_path), 3))
    if kind == "folder":
        assert isinstance(wrote, OSError)  # the agent says so, and counts by the steps
    else:
        assert wrote is None and read_attempt(str(tmp_path)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_event_log_is_not_waited_for(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = JsonlSink(put(kind, tmp_path / "events.jsonl"))
    event = Event(kind="x", time=0.0, monotonic_s=0.0, run="r", attempt=1, rank=0, host="h")
    assert at_once(lambda: sink.emit(event)) is None
    assert sink.dropped == 1 and str(tmp_path / "events.jsonl") in caplog.text
    sink.close()


# ---- folders that cannot be read


def steps(tier: LocalTier, *numbers: int) -> None:
    for number in numbers:
        tier.put_bytes(step_prefix("r", StepId(number, 1, "0a0b0c")) + "shard-00000.shard", b"x")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Folders that cannot be read, by a part of their path; a disk that fails."""
    bad: set[str] = set()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if any(part in str(path) for part in bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    yield bad


def test_a_folder_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, failing: set[str]) -> None:
    tier = LocalTier(tmp_path)
    steps(tier, 1, 2, 3)
    failing.add("0000000002-")
    with pytest.raises(UnreadableFolders, match="0000000002") as caught:
        list(tier.list(""))
    assert caught.value.retryable
    assert {info.key.split("/")[3][:10] for info in caught.value.found} == {"0000000001", "0000000003"}
    assert [step.step for step in step_folders(tier, "r")] == [1, 2, 3], "the step is there, and counts for the attempt"
    listings = scan(tier, "r")
    assert [listing.readable for listing in listings] == [True, False, True]
    assert "Input/output error" in listings[1].problems[""] and not listings[1].records
    assert find_runs(tier) == ["r"]


def test_a_folder_with_all_steps_that_cannot_be_read_is_an_error(tmp_path: Path, failing: set[str]) -> None:
    """Not an empty run: a job would start from scratch."""
    tier = LocalTier(tmp_path)
    steps(tier, 1)
    failing.add("/steps")
    with pytest.raises(TierError, match="Input/output error"):
        scan(tier, "r")


def test_temp_files_beside_a_folder_that_cannot_be_read_are_swept(tmp_path: Path, failing: set[str]) -> None:
    tier = LocalTier(tmp_path)
    steps(tier, 1, 2)
    left = [tmp_path / step_prefix("r", StepId(n, 1, "0a0b0c")) / partial_name() for n in (1, 2)]
    for path in left:
        path.write_bytes(b"")
        os.utime(path, (0, 0))
    failing.add("0000000001-")
    with pytest.raises(TierError):
        tier.sweep(older_than=timedelta(0))
    assert [path.exists() for path in left] == [True, False]
