"""The floors: the time this machine needs for a bare copy, write and fsync."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable

import torch

from benchmarks._contenders.base import Contender, Flush, Pending, State

__all__ = ["CopyFloor", "WriteFloor"]


class CopyFloor(Contender):
    """Copies every tensor into shared memory whose pages were touched before."""

    flush = Flush.NONE

    def warm_up(self, state: State) -> None:
        self._bytes = sum(tensor.nbytes for tensor in state.values())
        self._memory = os.memfd_create("floor", 0)  # 0: the writer inherits it
        os.ftruncate(self._memory, self._bytes)
        self._map = mmap.mmap(self._memory, self._bytes)
        self._copy, offset = {}, 0
        for name, tensor in state.items():
            self._copy[name] = torch.frombuffer(
                self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset
            ).zero_()
            offset += tensor.nbytes

    def save(self, step: int, state: State) -> Pending:
        for name, tensor in state.items():
            self._copy[name].copy_(tensor)
        return Pending()

    def restore(self, step: int, state: State) -> None:
        for name, tensor in state.items():
            tensor.copy_(self._copy[name])


class WriteFloor(CopyFloor):
    """The same copy; a child then writes it to one new file and fsyncs it. Restores with plain reads."""

    flush = Flush.OWN

    def warm_up(self, state: State) -> None:
        super().warm_up(state)
        command = [sys.executable, "-S", "-c", _WRITER, str(self._memory), str(self._bytes), str(self.folder)]
        self._writer = subprocess.Popen(
            command, pass_fds=[self._memory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def save(self, step: int, state: State) -> Pending:
        super().save(step, state)
        assert self._writer.stdin is not None
        self._writer.stdin.write(f"{step}\n")
        self._writer.stdin.flush()
        return Pending(durable=self._answer)

    def restore(self, step: int, state: State) -> None:
        with self.path(step).open("rb", buffering=0) as file:
            for tensor in state.values():
                _fill(file.readinto, memoryview(tensor.numpy()).cast("B"))

    def _answer(self) -> None:
        assert self._writer.stdout is not None
        if not self._writer.stdout.readline():
            raise RuntimeError("the writer of the floor died; its error is in the log")


def _fill(read_into: Callable[[memoryview], int | None], view: memoryview) -> None:
    while view:
        count = read_into(view)
        if not count:
            raise EOFError("the file of the floor is shorter than the state")
        view = view[count:]


# A separate process with few imports: a fork of the trainer would keep old pages of the state in memory.
_WRITER = """
import mmap, os, sys
memory, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
whole = memoryview(mmap.mmap(memory, size))
sum(whole[::4096])  # its page table is filled before the first save, like the trainer's
print("ready", flush=True)
for line in sys.stdin:
    file = os.open(os.path.join(folder, line.strip()), os.O_CREAT | os.O_WRONLY, 0o600)
    view = whole
    while view:
        view = view[os.write(file, view):]
    os.fsync(file)
    os.close(file)
    print("written", flush=True)
"""
