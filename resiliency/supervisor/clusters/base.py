"""The protocol of a cluster backend: what the supervisor asks of the cluster that its hosts belong to.

Ranks never wait for it. A host that is lost is replaced first, and the cluster is told afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from resiliency.errors import ResiliencyError
from resiliency.supervisor.model import RemedyKind

__all__ = ["Cluster", "ClusterUnavailable", "HostFacts", "Identity"]


class ClusterUnavailable(ResiliencyError):
    """The cluster cannot be asked now. Trying again later can help."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whom the cluster has vouched for.

    Attributes:
        host: the host that the client may speak for; "": none.
        node: the machine that it runs on.
        watches_node: it is no host of a job, and may report faults of its machine alone.
    """

    host: str
    node: str = ""
    watches_node: bool = False


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What the cluster says about a host.

    Attributes:
        node: the machine that it runs on.
        block: failure domain of the machine; "": unknown.
        job: identifies what the user has submitted (a JobSet); "": unknown.
        job_name: what people call it.
        job_created: when it was submitted, as a text that sorts by time; "": unknown.
        ended: what the cluster was told to keep with the job, see :meth:`Cluster.keep`; None: it does not know yet.
        unwanted: why the cluster, or somebody who works on it, wants the host empty; "": nobody does.
        is_down: its machine does not work, as the cluster says.
        is_gone: the host is no more, and none of this name will come.
    """

    host: str
    node: str = ""
    block: str = ""
    job: str = ""
    job_name: str = ""
    job_created: str = ""
    ended: str | None = None
    unwanted: str = ""
    is_down: bool = False
    is_gone: bool = False


class Cluster(Protocol):
    """A backend. Thread: the event loop's.

    Attributes:
        can: last resorts that it was found able to.
        vouches: hosts prove who they are by what the cluster has given them: :meth:`identify` is asked.
    """

    can: Collection[RemedyKind]
    vouches: bool

    async def run(self, changed: Callable[[HostFacts], None]) -> None:
        """Follows the cluster until it is cancelled.

        Args:
            changed: called with the facts of a host when they are new or different.
        """
        ...

    def wants_hosts(self, job: str) -> bool:
        """Whether the cluster has this job, and is to keep hosts for it: also when it has none in this moment."""
        ...

    async def identify(self, token: str) -> Identity | None:
        """Says whose token this is; None when it is nobody's who may connect here.

        Raises:
            ClusterUnavailable: the cluster cannot be asked now.
        """
        ...

    async def take_out(self, host: str, reason: str, *, is_dead: bool) -> str:
        """Tells the cluster not to use a host: cordons its machine, removes its pod. It may be called again with the
        same host, and is cancelled when its deadline has passed.

        Args:
            is_dead: it is not heard of. Another one is given the time to end what it does: checkpoints are uploaded.

        Returns:
            What went wrong; "" when it is done.
        """
        ...

    async def give_up(self, job: str, reason: str) -> str:
        """Tells the cluster that the job has failed for good. It may be called again.

        Returns:
            What went wrong; "" when it is done.
        """
        ...

    async def renew(self, job: str, *, whole: bool, reason: str) -> str:
        """Has every host of a job made anew, or the whole job, once.

        Returns:
            What went wrong; "" when it is done, or will be.
        """
        ...

    async def keep(self, job: str, text: str) -> str:
        """Keeps a text with a job, in place of the one before, where it outlives every state of a supervisor. It may be
        called again.

        Returns:
            What went wrong; "" when it is done.
        """
        ...

    async def close(self) -> None: ...
