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

__all__ = ["WorkerProcess", "Zygote"]

#: Seconds for workers to end when whoever started them is gone; then they are killed.
END_S = 5.0


class WorkerProcess:
    """A forked process. ``returncode`` is None while it runs, negative when a signal ended it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def wait(self, *, timeout_s: float) -> int:
        """Exit status. Raises :class:`Timeout` when the worker is still running then."""
        if not self._ended.wait(timeout_s):
            raise Timeout(f"worker {self.pid} still runs after {timeout_s:.1f} s")
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL; no error when it has ended already."""
        if self.returncode is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return


class Zygote:
    """Owns the forking process. Threads: any may start workers and wait for them; close from one.

    When the owner is gone without a close, even by SIGKILL, workers and what is in their process groups get SIGTERM,
    and SIGKILL after five seconds.
    """

    def __init__(self, preload: Sequence[str], *, log: str = os.devnull, path: Sequence[str] = ()) -> None:
        parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        env = child_environment(parent)
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
        self._log = log
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="zygote-reader", daemon=True)
        self._reader.start()

    def start(
        self, target: str, arguments: Mapping[str, Any], *, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> WorkerProcess:
        """Forks a worker that calls ``target`` ("module:function") with keyword arguments, in a session of its own."""
        assert self._process.stdin is not None
        # One request at a time, because the answers carry nothing that says which request they belong to.
        with self._starting, self._changed:
            before = len(self._started)
            self._process.stdin.write(
                json.dumps({"target": target, "arguments": dict(arguments), "env": dict(env or {})}) + "\n"
            )
            self._changed.wait_for(lambda: len(self._started) > before or self._ended, timeout_s)
            if len(self._started) == before:
                what = "has ended" if self._ended else f"forked nothing within {timeout_s:.0f} s"
                raise Timeout(f"the zygote {what}; a preload probably failed, see {self._log}")
            return self._started[before]  # it may have ended already

    def stacks_of(self, workers: Sequence[WorkerProcess], *, timeout_s: float = 5) -> str:
        """Python stacks of the main threads of workers that still run, and of what they have forked.

        Ends them (SIGABRT), one after another, because they write into one file. Blocks for ``timeout_s`` each at most;
        empty when nobody keeps the log.
        """
        begin = os.path.getsize(self._log)
        groups = {worker.pid for worker in workers if worker.returncode is None}
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) in groups:
                    process.send_signal(signal.SIGABRT)
                    psutil.wait_procs([process], timeout=timeout_s)
        return Path(self._log).read_bytes()[begin:].decode(errors="replace")

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
        """Ends every worker and the zygote. Idempotent."""
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
    gc.disable()  # nothing that an import makes is garbage, and looking for it takes a tenth of the time
    for name in preload:
        importlib.import_module(name)
    gc.freeze()  # a collection in a worker would write to, and so copy, every page of what was imported here
    gc.enable()
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
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            running.discard(pid)
            _send({"what": "ended", "pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if time.monotonic() >= kill_at:
            _signal_groups(running, signal.SIGKILL)
            kill_at = math.inf
        if open_input and 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                # Whoever started the workers has closed this, or is gone and has left them to nobody.
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


def _signal_groups(workers: Iterable[int], number: signal.Signals) -> None:
    for pid in workers:  # none was waited for, so that each number is still theirs
        with suppress(ProcessLookupError):  # a worker that has not got so far as to have a group of its own
            os.killpg(pid, number)


def _send(message: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # whoever started the workers is gone
        os.write(1, json.dumps(message).encode() + b"\n")


def _run_worker(request: Mapping[str, Any]) -> None:
    """Runs the worker in the forked process; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(2, 1)  # what the worker prints must not be read as the zygote's messages
        faulthandler.enable(all_threads=False)  # see stacks_of; all threads of a fork that hangs cannot be shown
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
    """Joins non-daemon threads as the interpreter does, with a deadline."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
