"""A fork server: a process that has imported slow modules once and forks worker processes from there.

A worker that needs torch and Lightning starts in tens of milliseconds instead of seconds, so a test can kill and
restart a job hundreds of times. The forking process itself runs no thread and no tensor operation. Linux only.

::

    with Zygote(["torch", "lightning.pytorch"]) as zygote:
        worker = zygote.start("tests.e2e.job:train", {"directory": "/tmp/x"}, env={"RANK": "0"})
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(timeout_s=10)
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from resiliency.errors import Timeout
from resiliency.settings import child_environment
from resiliency.testing.huge_pages import use_huge_pages

__all__ = ["WorkerProcess", "Zygote"]

#: Seconds that workers have to end after the process that started them is gone; then they are killed.
END_S = 5.0


class WorkerProcess:
    """A forked process. ``returncode`` is None while it runs, negative when a signal ended it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def wait(self, *, timeout_s: float) -> int:
        """Waits for the worker and returns its exit status.

        Raises:
            Timeout: the worker still runs after ``timeout_s``.
        """
        if not self._ended.wait(timeout_s):
            raise Timeout(f"worker {self.pid} still runs after {timeout_s:.1f} s")
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Sends SIGKILL; no error when the worker has ended already."""
        if self.returncode is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return


class Zygote:
    """Owns the forking process. Thread: any may start workers and wait for them; one closes it.

    When the owner ends without closing it, even by SIGKILL, workers and the processes in their groups get SIGTERM, and
    SIGKILL after five seconds, or as soon as the worker of their group has ended.
    """

    def __init__(self, preload: Sequence[str], *, log: str = os.devnull, path: Sequence[str] = ()) -> None:
        env = child_environment()
        env["PYTHONPATH"] = os.pathsep.join([*path, env["PYTHONPATH"]])
        env["OMP_NUM_THREADS"] = "1"
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "resiliency.testing.zygote", json.dumps(list(preload))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env=env,
                text=True,
                bufsize=1,
            )
        self._workers: dict[int, WorkerProcess] = {}
        self._started: list[WorkerProcess] = []
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        #: Path of what all workers print.
        self.log = log
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="zygote-reader", daemon=True)
        self._reader.start()

    def start(
        self, target: str, arguments: Mapping[str, Any], *, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> WorkerProcess:
        """Forks a worker that calls ``target`` ("module:function") with keyword arguments, in a session of its own.
        Blocks: up to ``timeout_s`` for the fork.

        Raises:
            Timeout: no worker was forked in that time.
        """
        assert self._process.stdin is not None
        # One request at a time, because an answer does not name its request.
        with self._starting, self._changed:
            before = len(self._started)
            self._process.stdin.write(
                json.dumps({"target": target, "arguments": dict(arguments), "env": dict(env or {})}) + "\n"
            )
            self._changed.wait_for(lambda: len(self._started) > before or self._ended, timeout_s)
            if len(self._started) == before:
                what = "has ended" if self._ended else f"forked nothing within {timeout_s:.0f} s"
                raise Timeout(f"the zygote {what}; a preload probably failed, see {self.log}")
            return self._started[before]  # the worker may have ended already

    def stacks_of(self, workers: Sequence[WorkerProcess], *, timeout_s: float = 5) -> str:
        """Python stacks of the main threads of workers that still run, and of the processes they have forked.

        Ends these processes (SIGABRT), one after another, because they write to one file. Blocks: up to ``timeout_s``
        for each. Returns "" when there is no log file.
        """
        begin = os.path.getsize(self.log)
        groups = {worker.pid for worker in workers if worker.returncode is None}
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) in groups:
                    process.send_signal(signal.SIGABRT)
                    psutil.wait_procs([process], timeout=timeout_s)
        return Path(self.log).read_bytes()[begin:].decode(errors="replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                if message["what"] == "started":
                    self._workers[message["pid"]] = WorkerProcess(message["pid"])
                    self._started.append(self._workers[message["pid"]])
                else:
                    worker = self._workers.pop(message["pid"])
                    worker.returncode = message["code"]
                    worker._ended.set()
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Kills every worker and ends the zygote. Idempotent. Blocks: up to 30 s."""
        for worker in list(self._workers.values()):
            worker.kill()
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        self._reader.join(10)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(preload: Sequence[str]) -> None:
    gc.disable()  # imports make no garbage, and looking for it would take a tenth of their time
    for name in preload:
        importlib.import_module(name)
    gc.freeze()  # otherwise a collection in a worker would write to, and so copy, every page of what was imported here
    gc.enable()
    use_huge_pages()
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    rest = b""
    running: set[int] = set()
    open_input = True
    kill_at = math.inf
    while open_input or running:
        patience_s = min(30, max(0, kill_at - time.monotonic()))
        ready, _, _ = select.select([0, ended] if open_input else [ended], [], [], patience_s)
        if ended in ready:
            os.read(ended, 4096)
        for pid in [pid for pid in running if _has_ended(pid)]:
            if not open_input:
                # Nobody is left who could end what it has forked. Before it is waited for, the number is still its own.
                _signal_groups([pid], signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            running.discard(pid)
            _send({"what": "ended", "pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if time.monotonic() >= kill_at:
            _signal_groups(running, signal.SIGKILL)
            kill_at = math.inf
        if open_input and 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                # The process that started the workers has closed the pipe, or has ended without ending them.
                open_input = False
                _signal_groups(running, signal.SIGTERM)
                kill_at = time.monotonic() + END_S
                continue
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    _run_worker(json.loads(line))
                running.add(pid)
                _send({"what": "started", "pid": pid})


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not waited for yet."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_groups(workers: Iterable[int], number: signal.Signals) -> None:
    for pid in workers:  # none was waited for, so each process id is still theirs
        with suppress(ProcessLookupError):  # a worker that does not have a group of its own yet
            os.killpg(pid, number)


def _send(message: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the process that started the workers is gone
        os.write(1, json.dumps(message).encode() + b"\n")


def _run_worker(request: Mapping[str, Any]) -> None:
    """Runs the worker in the forked process; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(2, 1)  # what the worker prints must not be read as a message of the zygote
        faulthandler.enable(all_threads=False)  # see stacks_of; a hanging fork cannot show all threads
        os.environ.update(request["env"])
        module, _, name = request["target"].partition(":")
        getattr(importlib.import_module(module), name)(**request["arguments"])
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:  # Boundary: the process ends here.
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        _run_exit_handlers(time.monotonic() + 30)
        os._exit(code)


def _run_exit_handlers(deadline: float) -> None:
    """Joins non-daemon threads as the interpreter does, with a deadline, and ends what multiprocessing has started (a
    manager's process would live on)."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
    started = sys.modules.get("multiprocessing.util")
    if started is not None:
        started._exit_function()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
