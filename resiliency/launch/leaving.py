"""How a process that runs the next attempt leaves the one that has ended: it releases everything that attempt held."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Set
from types import CodeType, FrameType
from typing import Any

from resiliency.errors import Timeout
from resiliency.launch.fresh import seed_anew
from resiliency.runtime.closing import close_held

__all__ = [
    "abort_collectives",
    "child_processes",
    "end_loader_workers",
    "is_importing",
    "leave_attempt",
    "looks_like_a_lost_peer",
    "may_be_interrupted",
    "signal_handlers",
    "waits_for_peers_only",
]

logger = logging.getLogger(__name__)

#: Seconds to wait for process groups to be destroyed.
_DROP_TIMEOUT_S = 0.5
#: Seconds for a child process to end after SIGKILL.
_KILL_TIMEOUT_S = 5.0
#: File name of the code that executes import statements, as frames show it.
_IMPORTING = "<frozen importlib._bootstrap>"
#: Marks errors of process groups, which torch raises as RuntimeError. Whole words only, so that "restored" or the
#: "token" of a websocket does not count: neither is a peer's fault.
_WORDS = re.compile(
    r"\b(gloo|nccl\w*|process ?group|tcpstore|broken pipe|socket (timeout|closed|error)|timed out waiting"
    r"|connection (was )?(closed|reset|refused|lost|aborted|broken)|timeout caused pair closure)\b"
)
#: Folders of the code that raises errors of connections to peers; a script has connections of its own, for example to a
#: data server.
_OF_PEERS = (f"{os.sep}torch{os.sep}distributed{os.sep}", os.path.dirname(os.path.dirname(__file__)) + os.sep)


def looks_like_a_lost_peer(error: BaseException) -> bool:
    """True for errors that a rank raises when another rank is gone, also as a cause or context of the error. Pure."""
    for one in _chain(error):
        kinds = {kind.__name__ for kind in type(one).__mro__}
        if isinstance(one, Timeout) or "DistError" in kinds:
            return True
        if isinstance(one, ConnectionError) and any(place in _raised_in(one) for place in _OF_PEERS):
            return True
        if isinstance(one, RuntimeError) and _WORDS.search(str(one).lower()):
            return True
    return False


def _raised_in(error: BaseException) -> str:
    """File name of the code that raised the error; "" when it has no traceback."""
    name, trace = "", error.__traceback__
    while trace is not None:
        name, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return name


def may_be_interrupted(frame: FrameType | None, outermost: CodeType) -> bool:
    """False where an exception raised from outside would do harm or be lost: within an import, because some modules
    (numpy) cannot be imported again after half an import, and in ``__del__``, from which Python lets no exception
    escape.

    Args:
        frame: what a thread runs.
        outermost: code at which to stop; its callers are not looked at.
    """
    return not any(
        code.co_filename == _IMPORTING or code.co_name == "__del__" for code in _codes_around(frame, outermost)
    )


def is_importing(frame: FrameType | None, outermost: CodeType) -> bool:
    """True within an import; the arguments are as in :func:`may_be_interrupted`."""
    return any(code.co_filename == _IMPORTING for code in _codes_around(frame, outermost))


def _codes_around(frame: FrameType | None, outermost: CodeType) -> Iterator[CodeType]:
    while frame is not None and frame.f_code is not outermost:
        yield frame.f_code
        frame = frame.f_back


def waits_for_peers_only(frame: FrameType | None) -> bool:
    """True when the native code under this frame can wait for nothing but other ranks: in a collective operation and,
    without a GPU, in a backward pass. False while it connects to the job's store, which it retries for a while.

    Args:
        frame: what a thread runs.
    """
    if frame is None:
        return False
    torch: Any = sys.modules.get("torch")
    folder = os.path.dirname(getattr(torch, "__file__", None) or "")
    name = frame.f_code.co_filename
    if not folder or not name.startswith(folder + os.sep):
        return False
    room, *rest = name[len(folder) + 1 :].split(os.sep)
    if rest == ["rendezvous.py"]:
        return False
    return room == "distributed" or (room == "autograd" and not torch.cuda.is_initialized())


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes and contexts, each once."""
    seen: set[int] = set()
    left = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, one.__context__]


def abort_collectives() -> None:
    """Ends operations of NCCL groups that wait for a peer. Torch has no such function for gloo: there an operation ends
    by itself if its direct neighbour has died, and otherwise at the group's timeout.

    Thread: not the one that waits in the operation, and not while the groups are destroyed.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    try:
        if "nccl" in distributed.get_backend():
            distributed.distributed_c10d._abort_process_group()
    except Exception:  # Boundary: private in torch; the launcher kills a stuck rank
        logger.warning("operations between GPUs could not be aborted", exc_info=True)


def child_processes() -> set[int]:
    """Process ids of children that multiprocessing has started, such as workers of data loaders."""
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def signal_handlers() -> dict[int, Any]:
    """Signal number -> its handler, for the signals whose handler Python knows."""
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def leave_attempt(error: BaseException, *, children: Set[int], handlers: Mapping[int, Any]) -> None:
    """Releases what the process holds of an attempt: frames and the model in them, process groups, worker processes.

    What modules and the caller of the function hold stays. Blocks: until worker processes have ended, up to 5 s each.

    Args:
        error: the exception that ended the attempt.
        children: process ids of children that stay.
        handlers: signal handlers from before the attempt. Lightning's handlers refer to its trainer, and are still set
            when the trainer was interrupted.
    """
    for number, handler in signal_handlers().items():
        # Torch sets its handler for the end of loader workers once per process, so that one stays.
        its_own = str(getattr(handler, "__module__", "")).partition(".")[0] == "torch"
        if handler is not handlers.get(number, handler) and not its_own:
            signal.signal(number, handlers[number])
    _end_workers(children)
    groups = _process_groups()
    for one in list(_chain(error)):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
    close_held()
    gc.collect()  # trainers, loops and loaders form cycles; a connection to a peer closes with its last reference
    _destroy_groups()
    _drop(groups)
    _forget_meshes()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    seed_anew()


def _end_workers(children: Set[int]) -> None:
    """Kills processes that multiprocessing has started, and closes the iterators of torch's data loaders.

    This must happen before the iterators become garbage: when garbage is collected, the threads that would tell workers
    to end may end first, and then each iterator waits for 5 s.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error when a worker is killed
    try:
        workers = [child for child in multiprocessing.active_children() if child.pid not in children]
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_KILL_TIMEOUT_S)
        for iterator in _loader_iterators():
            if any(worker.pid in children for worker in getattr(iterator, "_workers", [])):
                continue  # belongs to a loader from before the attempt
            try:
                iterator._shutdown_workers()
            except Exception:  # Boundary: torch's private function; the workers have ended anyway.
                logger.debug("an iterator of a data loader was not closed cleanly", exc_info=True)
    finally:
        signal.signal(signal.SIGCHLD, before)


def end_loader_workers() -> None:
    """Kills the worker processes of torch's data loaders, so that nothing waits for them. Blocks: up to 5 s each."""
    workers = {worker.pid for one in _loader_iterators() for worker in getattr(one, "_workers", ())}
    if workers:
        _end_workers(child_processes() - workers)


def _loader_iterators() -> list[Any]:
    kind = getattr(sys.modules.get("torch.utils.data.dataloader"), "_MultiProcessingDataLoaderIter", None)
    return [] if kind is None else [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _process_groups() -> list[Any]:
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return list(getattr(getattr(distributed, "_world", None), "pg_map", ()))


def _drop(groups: list[Any]) -> None:
    """Releases groups on another thread, because releasing the last reference waits for the group's operations, and a
    gloo operation may wait for half an hour after all its connections were closed. Blocks: up to half a second.

    Args:
        groups: is emptied.
    """
    thread = threading.Thread(target=groups.clear, name="resiliency-drop-groups", daemon=True)
    thread.start()
    thread.join(_DROP_TIMEOUT_S)


def _forget_meshes() -> None:
    """Empties what torch remembers of operations on DTensors.

    The results that it remembers are on the device mesh of this attempt. That of the next one is equal to it when the
    number of ranks is, but this process may be another of its ranks then: ``detach()`` of a parameter would say that it
    is the part of the rank that this process was before, and a restore would fill it with that rank's values.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    for one in gc.get_objects():  # some of them are attributes of thread-local objects
        if issubclass(type(one), functools._lru_cache_wrapper):
            if str(getattr(one, "__module__", "")).startswith("torch.distributed.tensor"):
                one.cache_clear()
    clear = getattr(sys.modules["torch._C"], "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:  # torch 2.6 has no second cache
        clear()


def _destroy_groups() -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    try:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except Exception:  # Boundary: any error of a backend whose peers are gone; the next attempt has its own group.
        logger.warning("the process group of the attempt that ended was not destroyed cleanly", exc_info=True)
    # Ranks of a group find each other by its number; a group that was abandoned while it formed has used one up.
    world = getattr(distributed.distributed_c10d, "_world", None)
    if world is not None and hasattr(world, "group_count"):
        world.group_count = 0
