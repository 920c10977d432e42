"""Torch's rendezvous where the host's monitor decides this launcher's place: ``--rdzv-backend supervised``.

Hosts do not meet. A place names the node rank and the number of hosts; the launcher of node rank 0 makes the
generation's store and reports its address, which the others get from their monitors. This launcher waits for nobody
but its monitor, so that a lost host holds nobody up.
"""

from __future__ import annotations

import logging
import socket

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from resiliency.launch.attempt_stores import AttemptStores
from resiliency.launch.monitor_link import MonitorLink
from resiliency.launch.orders import Orders, Wish
from resiliency.runtime.messages.launcher import Completed, FromMonitor, Master, NoPlace, Save, Stacks
from resiliency.runtime.messages.places import Place, store_address
from resiliency.runtime.processes import wait_for_any

__all__ = ["BACKEND", "SupervisedRendezvous", "register"]

logger = logging.getLogger(__name__)

BACKEND = "supervised"
#: Most seconds until a wait looks again, whatever it waits for.
_LONGEST_S = 10.0
_KEEP_STORES_S = 10.0


class SupervisedRendezvous(RendezvousHandler):
    """The rendezvous handler. Thread: one.

    Attributes:
        link: to the monitor.
        orders: the monitor's newest request.
        asks_for_stacks: the monitor has asked once for the stacks of the ranks; whoever writes them sets this to False.
        save_after: the optimizer step after which the monitor wants a save of all ranks; None: no open request.

    Args:
        name: of the monitor's socket.
        run_id: as given to torchrun.
        local_addr: address by which other hosts reach this one; None: its host name.
    """

    def __init__(self, name: str, *, run_id: str, local_addr: str | None) -> None:
        self.link = MonitorLink(name)
        self.orders = Orders()
        self.asks_for_stacks = False
        self.save_after: int | None = None
        self.stores = AttemptStores(keep_s=_KEEP_STORES_S)
        self._run_id = run_id
        self._local_addr = local_addr
        #: (generation, store) that this host made last; None: none yet.
        self._store: tuple[int, TCPStore] | None = None

    # -- torch's interface --------------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use the store that the launcher of node rank 0 serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Takes the next place. Blocks: until there is one.

        Raises:
            RendezvousGracefulExitError: the job is completed.
        """
        while not self.is_ready():
            wait_for_any(self.link.fds(), self.link.seconds_to_look(_LONGEST_S))
            self.serve()
        place = self.orders.start()
        if place.node_rank == 0 and self._store is not None:
            store: TCPStore | HashStore = self._store[1]
            address, port = self._address(), self._store[1].port
        else:
            store = HashStore()  # torch requires a store here; ranks get the address of the real one
            address, port = store_address(place.master)
        bootstrap = RendezvousStoreInfo(master_addr=address, master_port=port)
        return RendezvousInfo(store, place.node_rank, place.nodes, bootstrap)

    def is_closed(self) -> bool:
        return self.orders.wish is Wish.COMPLETED

    def set_closed(self) -> None:
        """Does nothing: the supervisor closes a job."""

    def num_nodes_waiting(self) -> int:
        """1 when running ranks must end, for another place or for none; else 0. Blocks: no."""
        self.serve()
        return int(self.orders.ends_ranks)

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Ends the connection. Idempotent. Returns True."""
        self.link.close()
        return True

    # -- messages from the monitor ------------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """True when there is a place to take, and its store's address is known. Blocks: no.

        Raises:
            RendezvousGracefulExitError: the job is completed.
        """
        if self.orders.wish is Wish.COMPLETED:
            raise RendezvousGracefulExitError("the job is completed")
        place = self.orders.place
        return self.orders.is_to_start and place is not None and (place.node_rank == 0 or bool(place.master))

    def serve(self) -> None:
        """Handles the monitor's messages. Blocks: no, except for the milliseconds in which a store is made."""
        for message in self.link.serve():
            self._follow(message)
        place = self.orders.place
        if place is not None and self.orders.is_to_start and place.node_rank == 0:
            self._make_store(place)

    def _follow(self, message: FromMonitor) -> None:
        if isinstance(message, Place):
            if not self.orders.give(message):
                logger.info(
                    "a place of generation %d is older than the present one, and is ignored", message.generation
                )
        elif isinstance(message, NoPlace):
            self.orders.withdraw()
        elif isinstance(message, Completed):
            self.orders.complete()
        elif isinstance(message, Stacks):
            self.asks_for_stacks = True
        elif isinstance(message, Save):
            self.save_after = message.step

    def _make_store(self, place: Place) -> None:
        """Makes and reports the generation's store at once, while ranks of the previous generation still leave: other
        hosts wait for it."""
        if self._store is not None and self._store[0] == place.generation:
            return
        self._store = place.generation, self.stores.make()
        address = self._address()
        address = f"[{address}]" if ":" in address else address
        where = f"{address}:{self._store[1].port}"
        self.link.stand("master", Master(generation=place.generation, address=where))

    def _address(self) -> str:
        if self._local_addr is None:
            self._local_addr = socket.getfqdn()
        return self._local_addr


def _create(parameters: RendezvousParameters) -> SupervisedRendezvous:
    return SupervisedRendezvous(parameters.endpoint, run_id=parameters.run_id, local_addr=parameters.local_addr or None)


def register() -> None:
    """Makes the backend known to torch. Idempotent."""
    rendezvous_handler_registry.register(BACKEND, _create)
