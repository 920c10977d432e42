"""Other processes beside a job that saves: stock readers, stopped ones, forked children, a stopped rank of yesterday.

The readers and the old attempt are processes of their own, which know nothing of each other.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from resiliency.checkpoint import arena, snapshot
from resiliency.checkpoint.arena import Slot
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import ConfigError
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import QUICK, differences, make_checkpointer, make_state, step_dirs
from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.processes import wait_stopped
from tests.zygote import start_script

SOON = timedelta(seconds=30)

READER = """
import glob, json, os, sys, torch
folder, how, stop = sys.argv[1:]
loads = gone = 0
bad = []
print("ready", flush=True)
while not os.path.exists(stop):
    names = glob.glob(os.path.join(folder, "*.ckpt"))
    if how != "mmap":
        names = [name for name in names if "last" in name] + names
    for name in names[:1] if how == "last" else names:
        if how == "mmap" and "last" in name:
            continue  # torch opens a mapped file twice, so a name that moves on may give two files
        try:
            state = torch.load(name, mmap=how == "mmap")
        except FileNotFoundError:
            gone += 1
            continue
        except Exception as error:
            if how == "mmap" and "No such file or directory" in str(error):
                gone += 1  # between the two times that torch opens it
                continue
            bad.append(f"{name}: {type(error).__name__}: {error}"[:300])
            continue
        loads += 1
        if loads == 50:
            open(f"{stop}.{how}", "w").close()
        steps = {int(state["step"])} | {int(t.min()) for t in state["w"]} | {int(t.max()) for t in state["w"]}
        if len(steps) != 1 or ("last" not in name and f"step={steps.pop()}.ckpt" != os.path.basename(name)):
            bad.append(f"{name}: steps {sorted(steps)}")
assert "resiliency" not in sys.modules
print(json.dumps({"loads": loads, "gone": gone, "bad": bad[:5]}), flush=True)
"""


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A fresh interpreter in a session of its own; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Forked:
    """A script in a fork of the zygote; what it prints is read line by line."""

    def __init__(self, worker: WorkerProcess, output: IO[str]) -> None:
        self.worker, self._output = worker, output

    def line(self) -> str:
        """The next line; "" when it has ended."""
        return self._output.readline().strip()


@contextmanager
def forked(zygote: Zygote, folder: Path, code: str, *arguments: object, **environment: str) -> Iterator[Forked]:
    """A process of its own session; killed at the end."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    worker = start_script(zygote, code, pipe, *map(str, arguments), env=environment)
    try:
        with open(pipe) as output:  # once the script has opened it, too
            yield Forked(worker, output)
    finally:
        worker.kill()
        worker.wait(timeout_s=20)


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "w": [torch.full((300_000,), float(step)), torch.full((50,), step, dtype=torch.int64)]}


def run_job(folder: Path, until: Callable[[int], bool]) -> int:
    """Saves without a pause, one step kept, files used again; returns the last step."""
    ends, step = time.monotonic() + 60, 0
    with make_checkpointer(LocalTierOptions(directory=str(folder), keep=1)) as checkpointer:
        while not until(step) and time.monotonic() < ends:
            step += 1
            names = [f"step={step}.ckpt", "last.ckpt"]
            ticket = checkpointer.save(step, state_of(step), names=names, supersedes=[f"step={step - 1}.ckpt"])
            assert ticket is not None
            ticket.wait(timeout=SOON)
    return step


@pytest.mark.long
def test_stock_readers_beside_a_job_that_saves_every_step_get_whole_steps(tmp_path: Path) -> None:
    folder, stop = tmp_path / "c", tmp_path / "stop"
    with (
        python(READER, folder, "plain", stop) as plain,
        python(READER, folder, "last", stop) as last,
        python(READER, folder, "mmap", stop) as mapped,
    ):
        readers = (plain, last, mapped)
        assert [line(reader) for reader in readers] == ["ready"] * 3
        enough = [Path(f"{stop}.{how}") for how in ("plain", "last", "mmap")]
        steps = run_job(folder, lambda step: step >= 30 and all(path.exists() for path in enough))
        stop.touch()
        found = [json.loads(line(reader)) for reader in readers]
    assert steps >= 30
    assert [one["bad"] for one in found] == [[], [], []]
    assert all(one["loads"] >= 50 for one in found), found


HOLDER = """
import mmap, os, signal, sys, torch
name, how = sys.argv[1:]
if how == "mapped":
    state = torch.load(name, mmap=True)
    os.kill(os.getpid(), signal.SIGSTOP)
elif how == "open":
    file = open(name, "rb")
    file.seek(100_000)
    os.kill(os.getpid(), signal.SIGSTOP)
    file.seek(0)
    state = torch.load(file, weights_only=True)
else:
    real = torch.UntypedStorage.from_file
    # Stopped by somebody in the middle of a load.
    inner = torch._C.PyTorchFileReader.get_record
    import torch.serialization as serialization
    rebuild, count = torch._utils._rebuild_tensor_v2, []
    def stopping(*arguments):
        count.append(1)
        if len(count) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return rebuild(*arguments)
    torch._utils._rebuild_tensor_v2 = stopping
    state = torch.load(name, weights_only=False)
print(int(state["step"]), sorted({int(t.min()) for t in state["w"]} | {int(t.max()) for t in state["w"]}), flush=True)
"""


@pytest.mark.parametrize("how", ["mapped", "open", "in the middle of a load"])
def test_a_reader_that_is_stopped_reads_its_old_step_whole_when_it_goes_on(
    zygote: Zygote, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "c"
    with make_checkpointer(LocalTierOptions(directory=str(folder), keep=1)) as checkpointer:
        ticket = checkpointer.save(1, state_of(1), names=["step=1.ckpt"])
        assert ticket is not None
        ticket.wait(timeout=SOON)
        with forked(zygote, tmp_path, HOLDER, folder / "step=1.ckpt", how) as reader:
            wait_stopped(reader.worker.pid)
            for step in range(2, 12):
                ticket = checkpointer.save(
                    step, state_of(step), names=[f"step={step}.ckpt"], supersedes=[f"step={step - 1}.ckpt"]
                )
                assert ticket is not None
                ticket.wait(timeout=SOON)
                assert checkpointer.flush(timeout=SOON)
            assert not (folder / "step=1.ckpt").exists(), "the old step was not even deleted"
            os.kill(reader.worker.pid, signal.SIGCONT)
            assert reader.line() == "1 [1]"


# ---- forked children


def arena_slots() -> list[Slot]:
    return list(arena._open_slots.values())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("place", ["disk", "ramdisk"])
def test_what_a_reader_has_sent_on_without_reading_it_arrives_as_it_was(place: str, tmp_path: Path) -> None:
    """``sendfile`` and ``splice`` put the pages of the file into a socket or a pipe, where they stay after the reader
    has closed the file. What is then written into the file would arrive in their place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if place == "ramdisk" else tmp_path) as folder:
        state = {"w": torch.zeros(600_000)}
        pipes = []
        with make_checkpointer(LocalTierOptions(directory=folder, keep=1, keep_named=False)) as checkpointer:
            checkpointer.warm_up(state)
            for step in range(1, 9):
                state["w"].fill_(step)
                ticket = checkpointer.save(step, state, names=["last.ckpt"])
                assert ticket is not None
                ticket.wait(Stage.COMMITTED, timeout=SOON)
                if step <= 3:
                    fd, (read, write) = os.open(Path(folder, "last.ckpt"), os.O_RDONLY), os.pipe()
                    assert os.splice(fd, write, 40_960, offset_src=1 << 20) == 40_960
                    os.close(fd)
                    pipes.append((step, read, write))
                checkpointer.flush(timeout=SOON)
        for step, read, write in pipes:
            os.close(write)
            with open(read, "rb") as file:
                assert set(torch.frombuffer(bytearray(file.read()), dtype=torch.float32).tolist()) == {step}


def test_a_fork_in_the_middle_of_a_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has the checkpointer, and no threads; it may drop it, collect it, use new memory and go on for long."""

    copying, go_on = threading.Event(), threading.Event()
    real = snapshot._copy

    def slow(*arguments: Any) -> Any:
        copying.set()
        assert go_on.wait(20)
        return real(*arguments)

    with make_checkpointer(LocalTierOptions(directory=str(tmp_path), keep=1)) as checkpointer:
        first = checkpointer.save(1, make_state(1, rows=20_000), names=["1.ckpt"])
        assert first is not None
        first.wait(timeout=SOON)
        monkeypatch.setattr(snapshot, "_copy", slow)
        state = make_state(2, rows=20_000)
        ticket = checkpointer.save(2, state, names=["2.ckpt"], lazy=True)
        assert ticket is not None and copying.wait(20)
        slot = arena_slots()[0]
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(writing)
                for tensor in (state["model"]["weight"], state["model"]["half"]):
                    tensor[:100].fill_(-1)  # its own copy of the pages; few, because torch's threads are gone
                memory = [bytearray(b"c" * (1 << 20)) for _ in range(64)]
                checkpointer.fence()
                refused = False
                try:
                    checkpointer.save(99, {})
                except ConfigError:
                    refused = True
                slot.close()
                checkpointer.close()
                del slot
                gc.collect()
                os.read(reading, 1)  # holds what it has until the parent has saved more
                code = 0 if refused and all(set(block) == {ord("c")} for block in memory) else 2
            finally:
                os._exit(code)
        os.close(reading)
        go_on.set()
        checkpointer.fence()
        ticket.wait(timeout=SOON)
        for step in range(3, 8):
            later = checkpointer.save(step, make_state(step, rows=20_000), names=[f"{step}.ckpt"])
            assert later is not None
            later.wait(timeout=SOON)
            assert differences(torch.load(tmp_path / f"{step}.ckpt"), make_state(step, rows=20_000)) == []
        assert differences(torch.load(tmp_path / "2.ckpt"), make_state(2, rows=20_000)) == []
        os.close(writing)
        assert os.waitpid(child, 0)[1] == 0, "the child died, or its memory was unmapped"
        restored = checkpointer.load()
        assert restored is not None and restored.step == 7
        assert differences(restored.state, make_state(7, rows=20_000)) == []


# ---- a rank of yesterday

OLD = """
import signal, sys, threading
from resiliency.checkpoint import snapshot
from resiliency.checkpoint.arena import Slot
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import ConfigError
from resiliency.testing.checkpoints import make_checkpointer, make_state
folder, point = sys.argv[1:]
real, passed = snapshot._copy, []
def stopping(*arguments):
    passed.append(1)
    if len(passed) == 2 and point == "copy":
        print("stopping", flush=True)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to the process, this thread might go on
    return real(*arguments)
checkpointer = make_checkpointer(LocalTierOptions(directory=folder, keep=2))
checkpointer.open()
first = checkpointer.save(1, make_state(1, rows=200_000), names=["last.ckpt"])
first.wait()
snapshot._copy = stopping
send = checkpointer._parts().session.client.send
def stop_before(message):
    if point == "seal" and type(message).__name__ == "Seal" and "seal" not in passed:
        passed.append("seal")
        print("stopping", flush=True)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to the process, this thread might go on
    send(message)
checkpointer._parts().session.client.send = stop_before
passed.append(1)
for step in (50, 51, 52):
    ticket = checkpointer.save(step, make_state(step, rows=200_000), names=["last.ckpt", f"old={step}.ckpt"])
    try:
        if ticket is not None:
            ticket.wait()
    except Exception as error:
        print("refused", flush=True)
        continue
    print("saved", flush=True)
print("end", flush=True)
checkpointer.close(flush=False)
"""


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and bytes of every file that belongs to committed steps, and of the names."""
    paths = [*folder.glob("*.ckpt")]
    for path in step_dirs(folder).values():
        if (path / "manifest.json").exists():
            paths += path.iterdir()
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in paths}


@pytest.mark.parametrize("point", ["copy", "seal"])
def test_a_rank_stopped_in_the_middle_of_a_save_changes_nothing_of_the_attempt_after_it(
    zygote: Zygote, tmp_path: Path, point: str
) -> None:
    folder = tmp_path / "c"
    # As on another host of a folder that both see: the new attempt starts although nobody ended the old one.
    with forked(zygote, tmp_path, OLD, folder, point, RESILIENCY_NODE="yesterday") as old:
        assert old.line() == "stopping"
        wait_stopped(old.worker.pid)
        with make_checkpointer(LocalTierOptions(directory=str(folder), keep=2), options=QUICK) as checkpointer:
            restored = checkpointer.load()
            assert restored is not None and restored.step == 1
            for step in range(2, 8):
                names = [f"new={step}.ckpt", "last.ckpt"]
                ticket = checkpointer.save(step, make_state(step, rows=200_000), names=names)
                assert ticket is not None
                ticket.wait(timeout=SOON)
                assert checkpointer.flush(timeout=SOON)
            before = contents(folder)
            os.kill(old.worker.pid, signal.SIGCONT)
            told = []
            while (text := old.line()) not in ("end", ""):
                told.append(text)
            assert text == "end" and "refused" in told and "saved" not in told, told
            assert old.worker.wait(timeout_s=30) == 0
            assert contents(folder) == before, "the old attempt changed files of the new one"
            assert differences(torch.load(folder / "last.ckpt"), make_state(7, rows=200_000)) == []
            restored = checkpointer.load()
            assert restored is not None and restored.step == 7
    with make_checkpointer(LocalTierOptions(directory=str(folder), keep=2)) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and restored.step == 7


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_says_nothing_to_the_agent_of_its_parent(tmp_path: Path) -> None:
    """It leaves through Lightning's exception hooks, say, which flush: on the connection that it has from the parent."""
    options = replace(QUICK, agent="process")
    with make_checkpointer(LocalTierOptions(directory=str(tmp_path)), options=options) as checkpointer:
        first = checkpointer.save(1, make_state(1), names=["1.ckpt"])
        assert first is not None
        first.wait(timeout=SOON)
        later = checkpointer.save(2, make_state(2), names=["2.ckpt"])
        assert later is not None
        child = os.fork()
        if child == 0:
            code = 1
            try:
                began = time.monotonic()
                flushed = checkpointer.flush(timeout=timedelta(seconds=8))
                outcomes = checkpointer.poll()
                try:
                    later.wait(Stage.DURABLE, timeout=timedelta(seconds=8))
                except ConfigError:
                    code = 0 if flushed and not outcomes and time.monotonic() - began < 4 else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert not checkpointer.session.client._flushed, "the agent has answered somebody else"
        assert checkpointer.flush(timeout=SOON) and later.has_reached(Stage.DURABLE)
