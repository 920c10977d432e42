"""One contender in isolation: ``python -m benchmarks._isolated SPEC_FILE``, started by the harness only.

Phases, in this order: set-up and warm-up (timed separately), saves without compute, saves whose memory is sampled,
saves during compute, restores. The state changes before every save.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks._contenders.base import Contender, Flush, Pending, State
from benchmarks._memory import marked, total
from benchmarks._state import Compute, digest, make_state, mutate, nbytes, wipe

_PATIENCE_S = 300.0
_IDLE_PROBE_S = 0.15


class _Run:
    """The phases of one contender; used by one thread."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        torch.set_num_threads(spec["threads"])
        self._state: State = make_state(mebibytes=spec["mebibytes"], tensors=spec["tensors"])
        self._compute = Compute()
        self._compute.rate(_IDLE_PROBE_S)  # starts the compute threads before anything is measured
        self._step = 0
        self._idle: list[float] = []
        self._saved: dict[str, int] = {}
        make: Callable[[Path], Contender] = getattr(importlib.import_module(spec["module"]), spec["attribute"])
        self._memory_before = total(marked(spec["mark"]))
        start = time.perf_counter()
        self._contender = make(Path(spec["folder"]))
        self._contender.warm_up(self._state)
        self._setup_s = time.perf_counter() - start

    def measure(self) -> dict[str, Any]:
        """Runs all phases. Returns what the harness tabulates: seconds and ratios."""
        bare = [self._bare() for _ in range(1 + self._spec["saves"])]
        with _sampled(self._spec["mark"]) as peak:  # before any restore, whose freed memory the allocator may keep
            for _ in range(2):
                self._bare()
        busy = [self._busy() for _ in range(self._spec["overlapped_saves"])]
        restores = [self._restore() for _ in range(self._spec["restores"])]
        size = nbytes(self._state)
        idle = median(self._idle)
        for save in busy:
            save["compute_ratio"] = None if save["compute_rate"] is None else save["compute_rate"] / idle
        result = {
            "bytes": size,
            "flush": self._contender.flush.value,
            "setup_s": self._setup_s,
            "first": bare[0],
            "warm": bare[1:],
            "overlapped": busy,
            "idle_rate": idle,
            "ram_x_state": max(0, peak[0] - self._memory_before) / size,
            "restore_s": restores,
        }
        self._contender.close()
        return result

    def _begin(self) -> tuple[int, float, Pending]:
        self._step += 1
        mutate(self._state)
        start = time.perf_counter()
        return self._step, start, self._contender.save(self._step, self._state)

    def _bare(self) -> dict[str, float | None]:
        """A save without compute: the worst case for a contender that copies during compute."""
        step, start, pending = self._begin()
        called = time.perf_counter()
        pending.safe()
        safe = time.perf_counter()
        pending.committed()
        committed = time.perf_counter()
        durable = self._finish(step, pending)
        self._contender.forget(step - 1)
        return {
            "call_s": called - start,
            "stall_s": safe - start,
            "committed_s": committed - start,
            "durable_s": None if durable is None else durable - start,
        }

    def _busy(self) -> dict[str, float | None]:
        """A save followed by compute, then the fence; then the state changes, and compute goes on until the save is
        durable."""
        self._idle.append(self._compute.rate(_IDLE_PROBE_S))
        step, start, pending = self._begin()
        called = time.perf_counter()
        flight: _InFlight = _Polled(pending.poll) if pending.poll else _Watched(lambda: self._finish(step, pending))
        units, computing = self._compute_while(lambda: time.perf_counter() < called + self._spec["compute_s"], flight)
        before_fence = time.perf_counter()
        pending.safe()
        fence = time.perf_counter() - before_fence
        self._saved = digest(self._state)
        mutate(self._state)  # the optimizer step: changes tensors that are not copied yet
        more, longer = self._compute_while(lambda: not flight.done(), flight)
        flight.finish()
        units, computing = units + more, computing + longer
        self._idle.append(self._compute.rate(_IDLE_PROBE_S))
        flown = computing >= 0.02  # less than that: no save was in flight, or it was too short to measure
        self._contender.forget(step - 1)
        return {
            "call_s": called - start,
            "fence_s": fence,
            "stall_s": called - start + fence,
            "compute_rate": units / computing if flown else None,
            "in_flight_s": computing,
        }

    def _compute_while(self, wanted: Callable[[], bool], flight: _InFlight) -> tuple[int, float]:
        """Computes while ``wanted``; counts only the units finished while the save was in flight, and their seconds."""
        units, counted, start = 0, 0.0, time.perf_counter()
        while wanted():
            self._compute.unit()
            now = time.perf_counter() - start
            if now > _PATIENCE_S:
                raise TimeoutError(f"the save of step {self._step} was still in flight after {_PATIENCE_S:.0f} s")
            if not flight.done():
                units, counted = units + 1, now
        return units, counted

    def _finish(self, step: int, pending: Pending) -> float | None:
        pending.committed()
        pending.durable()
        if self._contender.flush is Flush.NONE:
            return None
        if self._contender.flush is Flush.ADDED:
            _fsync_all(self._contender.path(step))
        return time.perf_counter()

    def _restore(self) -> float:
        """Restores the last save, which ran during compute and whose state was changed right after its fence."""
        wipe(self._state)
        start = time.perf_counter()
        self._contender.restore(self._step, self._state)
        seconds = time.perf_counter() - start
        found = digest(self._state)
        wrong = sum(found[name] != self._saved[name] for name in found)
        if wrong:
            raise AssertionError(
                f"after the restore of step {self._step}, {wrong} of {len(found)} tensors differ from what was saved"
            )
        return seconds


class _InFlight(Protocol):
    """A save in flight. Thread: the training thread."""

    def done(self) -> bool: ...

    def finish(self) -> None:
        """Waits for the end of the save; raises what the save raised."""


class _Polled:
    """A save that the training thread polls."""

    def __init__(self, poll: Callable[[], bool]) -> None:
        self._poll, self._done = poll, False

    def done(self) -> bool:
        self._done = self._done or self._poll()
        return self._done

    def finish(self) -> None:
        """Does nothing: ``poll`` has already raised what the save raised."""


class _Watched:
    """A save that a thread of its own waits for while the training thread computes."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # boundary of the thread: finish() raises it in the training thread
            self._error = error
        finally:
            self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def finish(self) -> None:
        self._thread.join(timeout=_PATIENCE_S)
        if self._error is not None:
            raise self._error


@contextmanager
def _sampled(mark: str) -> Iterator[list[int]]:
    """Yields a list that is empty within the block; when it is left, the peak memory in bytes is appended."""
    command = [sys.executable, "-m", "benchmarks._memory", mark]
    sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    peak: list[int] = []
    assert sampler.stdout is not None
    sampler.stdout.readline()
    try:
        yield peak
    finally:
        output, _ = sampler.communicate(timeout=60)
    peak.append(json.loads(output)["peak"])


def _fsync_all(path: Path) -> None:
    """Makes a finished checkpoint survive power loss: every file, then every folder that names one."""
    files = [entry for entry in path.rglob("*") if entry.is_file()] if path.is_dir() else [path]
    for entry in [*files, *sorted({file.parent for file in files})]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def main(spec_file: str) -> None:
    """Runs the contender of the spec and writes the result file; an import that fails is "unavailable", not an
    error."""
    spec = json.loads(Path(spec_file).read_text())
    dist.init_process_group("gloo", init_method=f"file://{Path(spec_file).parent / 'rendezvous'}", rank=0, world_size=1)
    try:
        result = _Run(spec).measure()
    except ImportError as error:
        traceback.print_exc()
        result = {"unavailable": f"does not import: {error}"}
    except Exception as error:  # boundary: the harness lists the reason, the log keeps the traceback
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:300]}
    target = Path(spec["result"])
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(target)
    # some contenders leave threads or processes that never end; the harness kills all that carry the mark
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
