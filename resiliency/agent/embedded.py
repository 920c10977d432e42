"""An agent in a thread of the trainer, for programs that must not start a process.

It listens on the same address, and speaks the same protocol, as an agent process: the first rank of a host that asks
for it serves all ranks of that host. It ends with that rank's process; then another rank starts one.
"""

from __future__ import annotations

import os
import threading
import weakref

from resiliency.agent.config import AgentConfig
from resiliency.agent.server import AgentServer

__all__ = ["EmbeddedAgent"]

#: Seconds that the agent gets to end when it is stopped with work left.
_STOP_S = 10.0


class _Running:
    def __init__(self, config: AgentConfig) -> None:
        self.server = AgentServer(config, listening=False)
        self.users: set[int] = set()
        self.thread = threading.Thread(target=self.server.run, name="resiliency-agent-serve", daemon=True)


class EmbeddedAgent:
    """One user's share in the agent that this process runs for an address. Thread: any; one at a time.

    Args:
        config: of the attempt.
    """

    _lock = threading.Lock()
    _of_address: dict[str, _Running] = {}  # noqa: RUF012 - of the process

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._running: _Running | None = None

    def start(self) -> None:
        """Starts the agent, if this process does not run it already. What it has begun when
        it raises, :meth:`close` ends. Blocks: no.

        Raises:
            OSError: another process serves the address (EADDRINUSE).
            RuntimeError: no thread can be started.
        """
        with self._lock:
            running = self._of_address.get(self._config.address)
            if running is not None and running.thread.is_alive():
                running.users.add(id(self))
                self._running = running
                return
            # In this order, so that close() finds what an exception leaves.
            self._running = running = _Running(self._config)
            running.users.add(id(self))
            running.server.listen()
            self._of_address[self._config.address] = running
            _listening.add(running.server)
            running.thread.start()

    def close(self, timeout_s: float) -> None:
        """Gives the share back; the last one in this process ends the agent. What it has not done by then, the next
        start does. Idempotent.

        Args:
            timeout_s: time for ranks of other processes to disconnect.

        Blocks: up to ``timeout_s``, and 10 s more for a running write.
        """
        with self._lock:
            running = self._running
            if running is None:
                return
            running.users.discard(id(self))
            if not running.users and self._of_address.get(self._config.address) is running:
                del self._of_address[self._config.address]
        if not running.users:
            running.server.stop(patience_s=timeout_s)
            if running.thread.ident is not None:
                running.thread.join(_STOP_S)
            running.server.close_listener()
        self._running = None


#: Servers of this process. A forked child has their sockets, too, and would keep the address when this process is
#: killed.
_listening: weakref.WeakSet[AgentServer] = weakref.WeakSet()


def _close_in_child() -> None:
    for server in list(_listening):
        server.close_listener()
    EmbeddedAgent._lock = threading.Lock()
    EmbeddedAgent._of_address = {}


os.register_at_fork(after_in_child=_close_in_child)
