"""How a process that stays leaves an attempt that has ended: what it holds of it is given up."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping, Set
from typing import Any, Protocol

from resiliency.errors import Timeout
from resiliency.launch.fresh import seed_anew
from resiliency.launch.peer_connections import shut_down_peer_connections
from resiliency.settings import all_variables

__all__ = [
    "abort_collectives",
    "child_processes",
    "close_when_left",
    "leave_attempt",
    "looks_like_a_lost_peer",
    "signal_handlers",
]

logger = logging.getLogger(__name__)

#: Seconds for a child process to end after SIGKILL.
_KILL_TIMEOUT_S = 5.0
#: Seconds for something that an attempt has left open to close.
_CLOSE_TIMEOUT_S = 0.5
#: In errors of process groups and their stores, most of which torch raises as RuntimeError.
_WORDS = ("gloo", "nccl", "process group", "connection", "broken pipe", "store", "socket")


def looks_like_a_lost_peer(error: BaseException) -> bool:
    """True for errors that a rank raises when another one is gone, itself or as a cause. Pure."""
    for one in _chain(error):
        kinds = {kind.__name__ for kind in type(one).__mro__}
        if isinstance(one, (Timeout, ConnectionError)) or "DistError" in kinds:
            return True
        if isinstance(one, RuntimeError) and any(word in str(one).lower() for word in _WORDS):
            return True
    return False


class _Closable(Protocol):
    def close(self, *, timeout_s: float) -> None: ...


#: Held by threads, so that they do not end with the frames of an attempt.
_to_close: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_when_left(held: _Closable) -> None:
    """Closes it when this process leaves its attempt. It may have been interrupted while it was opened or closed, so
    that nobody else would. ``close`` is idempotent. Thread: any."""
    _to_close.add(held)


def _close_held() -> None:
    for held in list(_to_close):
        _to_close.discard(held)
        try:
            held.close(timeout_s=_CLOSE_TIMEOUT_S)
        except Exception:  # Boundary: what is left of an attempt that failed; the next one is not to fail with it.
            logger.warning("%s of the attempt that ended was not closed cleanly", type(held).__name__, exc_info=True)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    seen: set[int] = set()
    left = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, one.__context__]


def abort_collectives() -> None:
    """Ends operations of process groups that wait for a peer, and waits for one as a group forms.

    Thread: not the one that waits in the operation.
    """
    port = all_variables().get("MASTER_PORT", "")
    shut_down_peer_connections(int(port) if port.isdecimal() else None)
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    try:
        if "nccl" in distributed.get_backend():
            distributed.distributed_c10d._abort_process_group()
    except Exception:  # Boundary: torch's private function; what is not aborted is killed by the launcher.
        logger.warning("operations between GPUs could not be aborted", exc_info=True)


def child_processes() -> set[int]:
    """Process ids of this process's children that multiprocessing has started, as workers of data loaders."""
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def signal_handlers() -> dict[int, Any]:
    """Of each signal that has a handler that Python knows."""
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def leave_attempt(error: BaseException, *, children: Set[int], handlers: Mapping[int, Any]) -> None:
    """Gives up what the process holds of an attempt: frames and the model in them, process groups, worker processes.

    What modules and the caller of the function hold stays. Blocks: until worker processes have ended, up to 5 s each.

    Args:
        error: that ended the attempt.
        children: process ids that are to stay.
        handlers: of signals, as before the attempt. Lightning's refer to its trainer, which has not taken them back
            where it was interrupted.
    """
    for number, handler in signal_handlers().items():
        # Torch sets its handler for the ends of loaders' workers once in a process.
        its_own = str(getattr(handler, "__module__", "")).partition(".")[0] == "torch"
        if handler is not handlers.get(number, handler) and not its_own:
            signal.signal(number, handlers[number])
    _end_workers(children)
    for one in list(_chain(error)):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
    _close_held()
    gc.collect()  # loops, data loaders and trainers refer to each other; connections to peers close with the last one
    _destroy_groups()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    seed_anew()


def _end_workers(children: Set[int]) -> None:
    """Kills processes that multiprocessing has started, and closes the iterators of torch's data loaders.

    Before they are garbage: when that is collected, the threads that would tell workers to end may end first, and each
    iterator waits for 5 s.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker is killed
    try:
        workers = [child for child in multiprocessing.active_children() if child.pid not in children]
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_KILL_TIMEOUT_S)
        for iterator in _loader_iterators():
            if any(worker.pid in children for worker in getattr(iterator, "_workers", [])):
                continue  # of a loader that is not of the attempt
            try:
                iterator._shutdown_workers()
            except Exception:  # Boundary: a private function of torch; the workers have ended.
                logger.debug("an iterator of a data loader was not closed cleanly", exc_info=True)
    finally:
        signal.signal(signal.SIGCHLD, before)


def _loader_iterators() -> list[Any]:
    kind = getattr(sys.modules.get("torch.utils.data.dataloader"), "_MultiProcessingDataLoaderIter", None)
    return [] if kind is None else [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _destroy_groups() -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    try:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except Exception:  # Boundary: whatever a backend raises whose peers are gone; the next attempt has its own group.
        logger.warning("the process group of the attempt that ended was not destroyed cleanly", exc_info=True)
    # Groups are numbered, and meet under their numbers: one that was left while it formed has one, too.
    world = getattr(distributed.distributed_c10d, "_world", None)
    if world is not None and hasattr(world, "group_count"):
        world.group_count = 0
