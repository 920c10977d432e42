"""Children of this process that begin as it is now: in a later state, with threads and much that is open, it cannot fork
them itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from resiliency.launch.standby import _wait_for_new_parent
from resiliency.runtime import channel
from resiliency.runtime.channel import pair, receive, send
from resiliency.runtime.processes import _PR_SET_CHILD_SUBREAPER, _prctl

__all__ = ["ForkHelper"]

#: File descriptors with one request; a process that is spawned gets one for each shared tensor.
_MOST_FDS = 200


class ForkHelper:
    """A fork of this process, made here, that forks others when they are wanted. It ends with this process.

    Args:
        run: what they do, with the request and its file descriptors, which have other numbers then.
    """

    def __init__(self, run: Callable[[Mapping[str, Any], Sequence[int]], NoReturn]) -> None:
        self._requests, requests = pair()
        if os.fork() == 0:
            self._requests.close()
            _serve(requests, run)
        requests.close()

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """The process, which is a child of this one: its parent has ended, and this one takes orphans meanwhile."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            send(self._requests, request, fds)
            answer = receive(self._requests)
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer is not None, "the helper that forks has ended"
        return int(answer[0]["pid"])


def _serve(requests: Any, run: Callable[[Mapping[str, Any], Sequence[int]], NoReturn]) -> NoReturn:
    channel._MAX_FDS = _MOST_FDS  # of this process
    while (received := receive(requests)) is not None:
        request, fds = received
        said_read, said = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _wait_for_new_parent(parent)
                run(request, fds)
            os.write(said, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        send(requests, {"pid": int(os.read(said_read, 100))})
        for fd in (*fds, said_read, said):
            os.close(fd)
    os._exit(0)
