"""The zygote: imports what ranks need, then keeps standbys, which are forks of itself that become ranks on request.

The zygote runs one thread, and uses no GPU and no tensor. A standby is the launcher's child, not the zygote's: it is
forked twice, so that the launcher can see and collect its end, and so that ranks outlive the zygote. When the launcher
ends, the kernel ends standbys and ranks (PR_SET_PDEATHSIG).

The idea of a process that has everything imported and forks comes from Android's zygote.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from resiliency.launch.fresh import ScriptCommand, become_fresh, run_script
from resiliency.runtime.channel import receive, send
from resiliency.runtime.command_line import show_command_line
from resiliency.runtime.forked_function import run_function
from resiliency.runtime.processes import end_with_parent
from resiliency.runtime.start_times import script_begins
from resiliency.settings import all_variables, set_variable

__all__ = ["main"]

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_PID_BYTES = 8
#: A request to run something, and the file descriptors that came with it.
_Request = tuple[dict[str, Any], list[int]]


def main(arguments: Sequence[str]) -> None:
    """Runs the zygote. Returns when the launcher has closed its end, and in a fork when the rank's script has ended.

    Args:
        arguments: file descriptors of the control and the request socket; the launcher's process id; number of
            standbys; modules to import, separated by commas.
    """
    control, requests = (socket.socket(fileno=int(word)) for word in arguments[:2])
    launcher, count, modules = int(arguments[2]), int(arguments[3]), arguments[4].split(",")
    _die_with_parent(launcher)
    began = time.monotonic()
    changed: dict[str, str] = {}
    try:
        changed = _preload(modules)
        problem = _why_not_fork()
    except BaseException as error:  # Boundary: an import may raise anything; the launcher is told.
        problem = f"a preloaded module cannot be imported: {type(error).__name__}: {error}"
    report = {"problem": problem, "seconds": time.monotonic() - began, "modules": _module_folders()}
    with suppress(OSError):  # the launcher is gone, and the next wait ends this process
        send(control, report)
    if problem:
        return
    given = _serve(control, requests, launcher, count)
    if given is not None:
        # Called here, near the bottom of the stack, because the script can see the depth of its stack.
        _run(given[0], given[1], changed)


def _preload(modules: Sequence[str]) -> dict[str, str]:
    """Imports the modules; returns the environment variables that the imports have set, which ranks get too."""
    before = all_variables()
    # Makes torch answer whether there is a GPU without initialising CUDA, which a fork could not undo.
    set_variable(_NVML_CHECK, "1")
    gc.disable()  # imports produce no garbage, and searching for it takes a tenth of the time
    for name in filter(None, modules):
        importlib.import_module(name)
    gc.freeze()  # else a collection in a rank would write to, and so copy, every page imported here
    gc.enable()
    if _NVML_CHECK not in before and not {"lightning.fabric", "lightning_fabric"} & set(sys.modules):
        set_variable(_NVML_CHECK, None)  # Lightning sets it itself
    return {name: value for name, value in all_variables().items() if before.get(name) != value}


def _why_not_fork() -> str:
    """The reason why forks of this process would not work; "" when they would."""
    threads = _threads_after_a_fork()
    if threads > 1:
        return f"a preloaded module has started {threads - 1} threads, which a fork would lack"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module has initialised CUDA, which does not work in a fork"
    return ""


def _threads_after_a_fork() -> int:
    """Number of threads of this process that would be missing in a fork. OpenBLAS, in numpy, starts threads at import,
    ends them before any fork, and starts them again in the child; jemalloc, in pyarrow, is prepared for forks too."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 0.2
    # A joined thread may be in this list for a moment longer, and no event tells when it is not.
    while (threads := sum(map(_is_missed, os.listdir("/proc/self/task")))) > 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    return threads


def _is_missed(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/comm") as name:
            return name.read().strip() != "jemalloc_bg_thd"
    except OSError:
        return False  # it has ended


def _module_folders() -> dict[str, str]:
    """The folder in which each top-level module was found; "" for built-in ones."""
    folders = {}
    for name, module in list(sys.modules.items()):
        if "." not in name and name != "__main__":
            origin = getattr(module, "__file__", None) or ""
            is_package = os.path.basename(origin).startswith("__init__.")
            folders[name] = os.path.realpath(os.path.dirname(os.path.dirname(origin) if is_package else origin))
    return folders


def _serve(control: socket.socket, requests: socket.socket, launcher: int, count: int) -> _Request | None:
    """Keeps ``count`` standbys until the launcher is gone, then returns None; in a standby it returns what to run."""
    taken_read, taken = os.pipe()
    standbys: dict[int, int] = {}  # process id -> pidfd
    while True:
        while len(standbys) < count:
            pid = _fork_standby(launcher)
            if pid == 0:
                for fd in (taken_read, *standbys.values()):
                    os.close(fd)
                control.close()
                return _wait_for_request(requests, taken)
            standbys[pid] = os.pidfd_open(pid)
        poller = select.poll()
        for fd in (control.fileno(), taken_read, *standbys.values()):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        if control.fileno() in ready:
            return None
        gone = {pid for pid, fd in standbys.items() if fd in ready}
        if taken_read in ready:
            gone.add(int.from_bytes(os.read(taken_read, _PID_BYTES), "little"))  # that standby has become a rank
        for pid in gone & set(standbys):
            os.close(standbys.pop(pid))


def _fork_standby(launcher: int) -> int:
    """Forks a child of the launcher, twice; returns its process id, or 0 in the standby itself."""
    said_read, said = os.pipe()
    between = os.fork()
    if between == 0:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(said_read)
            os.close(said)
            _wait_for_new_parent(parent)
            _die_with_parent(launcher)
            return 0
        os.write(said, pid.to_bytes(_PID_BYTES, "little"))
        os._exit(0)
    os.close(said)
    pid = int.from_bytes(os.read(said_read, _PID_BYTES), "little")
    os.close(said_read)
    os.waitpid(between, 0)
    return pid


def _wait_for_new_parent(parent: int) -> None:
    """Waits, up to 10 s, until the intermediate process has ended; the kernel gives its children a new parent before
    the pidfd becomes readable. Not for the new parent, which is another one than the launcher when that has ended."""
    if os.getppid() == parent:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(parent)
            select.select([fd], [], [], 10)
            os.close(fd)


def _die_with_parent(launcher: int) -> None:
    end_with_parent(signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # the launcher ended before end_with_parent took effect


def _wait_for_request(requests: socket.socket, taken: int) -> _Request:
    """Blocks, in a standby, until it gets a request; any of the standbys may get it. Ends the process with the
    launcher."""
    received = receive(requests)
    if received is None:
        os._exit(0)
    request, fds = received
    os.write(taken, os.getpid().to_bytes(_PID_BYTES, "little"))
    os.close(taken)
    requests.close()
    return request, fds


def _run(request: dict[str, Any], fds: list[int], changed: dict[str, str]) -> None:
    """Becomes the rank, or another process that a rank has asked for.

    Args:
        fds: for a rank: the socket on which the launcher waits for an answer, standard output and standard error.
        changed: environment variables that imported modules have set.
    """
    if "function" in request:
        end_with_parent(0)  # this process outlives the launcher
        run_function(request, fds)
    reply, *output = fds
    command = ScriptCommand(**{**request["command"], "arguments": tuple(request["command"]["arguments"])})
    os.setsid()
    for number, fd in enumerate(output, start=1):
        os.dup2(fd, number)
        os.close(fd)
    become_fresh(
        command,
        environment={**request["environment"], **changed},
        cwd=request["cwd"],
        words=request["words"],
        ignored=request["ignored"],
        blocked=request["blocked"],
    )
    show_command_line(request["words"])
    with socket.socket(fileno=reply) as end:
        send(end, {"pid": os.getpid()})
    script_begins()
    run_script(command)
