"""A store into a mapping whose file has no byte there ends the process with SIGBUS: files shrink only where nobody maps
them, and have their blocks before they are mapped. Real processes, because that is what would die."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.checkpoint.arena import Arena
from resiliency.errors import TierError
from resiliency.storage import file_end
from resiliency.testing.zygote import Zygote
from tests.rings import few
from tests.zygote import start_script

Run = Callable[..., list[tuple[int, Any]]]

_RANKS = """
import json, os, sys, threading
from datetime import timedelta
import torch
from torch.distributed import FileStore
from resiliency import faultpoints
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.coordinator import StoreCoordinator
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions
from resiliency.errors import ResiliencyError
from resiliency.storage.stage import Stage

folder, sizes, faults = json.loads(os.environ["JOB"])

def work(rank):
    coordinator = StoreCoordinator(FileStore(folder + ".store", 2), rank=rank, world_size=2, prefix="t")
    options = CheckpointerOptions(agent="process", previous_save_timeout=timedelta(seconds=80))
    engine = Checkpointer(LocalTierOptions(directory=folder), run="run", rank=rank, world_size=2,
                          coordinator=coordinator, options=options)
    said = []
    for step in (2, 3):
        # Step 2 is the one whose ranks disagree.
        mib = sizes[rank] if step == 2 else 4
        state = {"w": torch.full((mib << 18,), float(step))}
        coordinator.all_gather(f"step {step}", b"", timeout=timedelta(seconds=90))
        faultpoints.arm(faults[rank] if step == 2 else "")
        ticket = engine.save(step, state, lazy=True)
        engine.fence()
        try:
            ticket.wait(Stage.COMMITTED, timeout=timedelta(seconds=80))
            said.append("committed")
        except ResiliencyError as error:
            said.append(str(error))
    coordinator.all_gather("end", b"", timeout=timedelta(seconds=90))
    engine.close(flush=False)
    print(json.dumps(said), flush=True)

work(int(sys.argv[1]))
"""


@pytest.fixture
def run(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a script in a process for each rank. Returns the exit codes and the JSON that they print last."""

    def run(script: str, job: Any, *, ranks: int = 1) -> list[tuple[int, Any]]:
        folder = tmp_path_factory.mktemp("run")
        outputs = [folder / f"{rank}.out" for rank in range(ranks)]
        env = {"JOB": json.dumps(job)}
        workers = [start_script(zygote, script, output, str(rank), env=env) for rank, output in enumerate(outputs)]
        deadline = time.monotonic() + 170
        try:
            codes = [worker.wait(timeout_s=max(0.1, deadline - time.monotonic())) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        texts = [output.read_text() for output in outputs]
        return [
            (code, json.loads(text.splitlines()[-1]) if code == 0 else text[-3000:])
            for code, text in zip(codes, texts, strict=True)
        ]

    return run


@pytest.fixture(params=["disk", "ramdisk"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    where = "/tmp" if request.param == "disk" else "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="resiliency-", dir=where) as root:
        yield Path(root, "ckpts")


@pytest.mark.timeout(240)
def test_no_rank_dies_when_another_has_a_smaller_state(run: Run, folder: Path) -> None:
    """Rank 0 ends the file while rank 1 still stores behind that end. The save fails, and says why."""
    results = run(_RANKS, [str(folder), [4, 64], ["", "save.block:delay=1.5@1"]], ranks=2)
    assert [code for code, _ in results] == [0, 0], f"a rank was killed by a signal: {results}"
    for _, said in results:
        assert "different sets of tensors" in said[0] and said[1] == "committed", results


# ---- a disk that fills while a file is written


_FILL = """
import ctypes, json, os
from resiliency.checkpoint.arena import Arena
folder, nbytes = json.loads(os.environ["JOB"])
slot = Arena().open(os.path.join(folder, "steps", "shard"), nbytes)
blocks = os.fstat(slot.fd).st_blocks * 512
with open(os.path.join(folder, "filler"), "wb", buffering=0) as filler:
    try:
        while filler.write(b"x" * 65536) == 65536:
            pass
    except OSError:
        pass
ctypes.memset(slot.address, 1, nbytes)  # the disk is full: a page without a block ends the process here
with open(slot.path, "rb") as file:
    whole = file.read() == b"\\1" * nbytes
os.fsync(slot.fd)
print(json.dumps([blocks, whole]))
"""


@pytest.fixture(params=["ext4", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    else:
        with open(image, "wb") as file:
            file.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True, timeout=60)
        mount = ["mount", "-o", "loop", str(image), str(folder)]
    subprocess.run(mount, check=True, capture_output=True, timeout=60)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True, timeout=60)


def test_a_file_has_all_its_blocks_before_it_is_mapped(run: Run, small_disk: Path) -> None:
    nbytes = 8 << 20
    ((code, result),) = run(_FILL, [str(small_disk), nbytes])
    assert code == 0, f"exit code {code}: {result}"
    blocks, whole = result
    assert whole and blocks >= nbytes


def test_a_file_that_the_disk_has_no_room_for_is_refused_before_it_is_mapped(small_disk: Path) -> None:
    with pytest.raises(TierError, match="free space"):
        Arena().open(str(small_disk / "steps" / "shard"), 64 << 20)


# ---- the end of a file


def opened_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


def test_a_file_is_not_cut_while_another_holds_what_is_behind_the_end(tmp_path: Path) -> None:
    mine, other = opened_file(tmp_path / "f"), opened_file(tmp_path / "f")
    try:
        os.ftruncate(mine, 10_000)
        file_end.hold(other, 8_000)
        assert not file_end.cut(mine, 7_999, wait_s=0.1) and os.fstat(mine).st_size == 10_000
        assert file_end.cut(mine, 8_000, wait_s=0.1) and os.fstat(mine).st_size == 8_000
        # A mapping keeps what its descriptor held.
        mapping = mmap.mmap(other, 8_000)
        os.close(other)
        assert not file_end.cut(mine, 10, wait_s=0.1)
        mapping.close()
        assert file_end.cut(mine, 10, wait_s=0.1)
    finally:
        os.close(mine)


def test_two_who_make_a_file_longer_never_make_it_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system cannot allocate ahead: the second must not cut off what the first has added meanwhile."""
    mine, other, real = opened_file(tmp_path / "f"), opened_file(tmp_path / "f"), os.ftruncate
    threads: list[threading.Thread] = []

    def cannot(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    def late(fd: int, nbytes: int) -> None:
        if fd == mine:  # it has looked at the length; now the other comes
            threads.append(threading.Thread(target=file_end.lengthen, args=(other, 9_000), kwargs={"alone": False}))
            threads[0].start()
            threads[0].join(0.5)
        real(fd, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    monkeypatch.setattr(os, "ftruncate", late)
    try:
        file_end.lengthen(mine, 5_000, alone=False)
        threads[0].join(20)
        assert os.fstat(mine).st_size == 9_000
    finally:
        os.close(mine)
        os.close(other)


def test_without_locks_nothing_is_cut_that_another_could_have_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(file_end.fcntl, "fcntl", no_locks)
    fd = opened_file(tmp_path / "f")
    try:
        file_end.hold(fd, 100)
        file_end.lengthen(fd, 100, alone=False)
        assert not file_end.cut(fd, 50, wait_s=0.1) and os.fstat(fd).st_size == 100
        assert file_end.cut(fd, 100)
    finally:
        os.close(fd)


_CUT_WHILE_LOADING = """
import glob, json, os, sys
import torch
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.shard_assembler import ShardAssembler
from resiliency.errors import CorruptShard

folder, into = json.loads(os.environ["JOB"])
engine = Checkpointer(folder, options=CheckpointerOptions(agent="embedded"))
engine.save(1, {"w": torch.ones(3000, 1000), "v": torch.ones(3000, 1000)}).wait()
(path,) = glob.glob(folder + "/.resiliency/*/steps/*/shard-00000.shard")
read = ShardAssembler.read

def cut(self, *, threads):
    os.truncate(path, 4096)
    return read(self, threads=threads)

ShardAssembler.read = cut
ways = {"new": {}, "into": {"into": {"w": torch.zeros(1000, 3000).t(), "v": torch.zeros(3000, 1000)}},
        "keys": {"keys": lambda key: key == "v"}}
try:
    engine.load(**ways[into])
    said = "loaded"
except CorruptShard as error:
    said = "refused" if path in str(error) else str(error)
engine.close(flush=False)
print(json.dumps(said), flush=True)
"""


@pytest.mark.parametrize("into", ["new", "into", "keys"])
def test_a_file_that_is_cut_while_it_is_loaded_is_damage_and_no_end_of_the_process(
    run: Run, tmp_path: Path, into: str
) -> None:
    assert run(_CUT_WHILE_LOADING, [str(tmp_path), into]) == [(0, "refused")]


_FILLING = """
import json, os
import torch
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions
from resiliency.storage.stage import Stage

folder, agent = json.loads(os.environ["JOB"])
options = CheckpointerOptions(agent=agent, lazy_bytes=1)
wrong = []
with Checkpointer(LocalTierOptions(directory=folder, keep=1), options=options) as engine:
    engine.warm_up({"w": torch.ones(1 << 20)}, slots=6)
    for step in range(1, 13):
        mib = (4, 9, 2, 30, 1, 16)[step % 6]
        state = {"w": torch.full((mib << 18,), float(step))}
        ticket = engine.save(step, state, lazy=True, names=[f"{step}.ckpt"])
        # While it is being filled: other sizes are wanted, files are given back, and more of them than are kept.
        engine.warm_up(nbytes=(7, 3, 25)[step % 3] << 20, slots=6)
        engine.delete(f"{step - 1}.ckpt")
        engine.fence()
        ticket.wait(Stage.COMMITTED)
        back = engine.load()
        if not torch.equal(back.state["w"], state["w"]):
            wrong.append(step)
print(json.dumps(wrong), flush=True)
"""


@pytest.mark.parametrize("agent", few(["embedded", "process"], ["process"]))
def test_files_that_are_prepared_and_given_back_while_one_is_filled_end_nothing(
    run: Run, tmp_path: Path, agent: str
) -> None:
    assert run(_FILLING, [str(tmp_path), agent]) == [(0, [])]
