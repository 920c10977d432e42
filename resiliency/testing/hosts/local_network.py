"""A network between hosts on one machine: each in a network namespace of its own, and a cable to a switch.

::

    host 0: eth0 198.18.N.10 ---- host0 \\
    host 1: eth0 198.18.N.11 ---- host1  > bridge (a namespace of its own) ---- resilNNNNNN 198.18.N.1: the supervisor
    host 2: eth0 198.18.N.12 ---- host2 /

No part of it has a name in the file system. The switch lasts as long as a process holds its socket: the process that
made it, the supervisor, and each monitor, so that hosts train on when the first of them is killed. A host's namespace
lasts as long as a process in it, or the process that made it. When the switch is removed all cables are, including
the one in the machine's own namespace.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import random
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from resiliency.errors import ConfigError
from resiliency.testing.hosts.namespaces import Namespace, set_link_up, within

__all__ = ["Cable", "LocalNetwork"]

logger = logging.getLogger(__name__)

#: A range reserved for tests of networks (RFC 2544). One of its /24 parts that this machine has no route to is used.
_RANGE = ipaddress.IPv4Network("198.18.0.0/15")
_PREFIX = 24
_FIRST_HOST, _MOST_HOSTS = 10, 240
_BRIDGE, _IN_HOST = "bridge", "eth0"


class Cable:
    """A host's cable, seen from the switch. While it is pulled the host keeps its address and reaches no other host.
    Thread: one.

    Args:
        control: a socket in the switch's namespace.
        link: name of the cable's end at the switch.
    """

    def __init__(self, control: socket.socket, link: str) -> None:
        self._control, self.link = control, link

    @classmethod
    def inherited(cls, text: str) -> Cable:
        """Opens a cable from ``FD:LINK``, the text of :meth:`words`.

        Raises:
            ConfigError: the text is not of this form, or the descriptor is no socket.
        """
        fd, _, link = text.partition(":")
        try:
            return cls(socket.socket(fileno=int(fd)), link)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--cable {text}: {error}; only resiliency run passes this") from error

    def words(self) -> str:
        """The cable as text for :meth:`inherited`, in a process that has inherited the descriptor."""
        return f"{self._control.fileno()}:{self.link}"

    def pull(self) -> None:
        """Cuts the host off.

        Raises:
            OSError: the switch is gone, or this process may not do it.
        """
        set_link_up(self._control, self.link, False)

    def plug_in(self) -> None:
        """Connects the host again.

        Raises:
            OSError: as :meth:`pull`.
        """
        set_link_up(self._control, self.link, True)

    def close(self) -> None:
        """Leaves the cable as it is, pulled or not. Idempotent."""
        self._control.close()


class LocalNetwork:
    """Creates the namespaces, the switch, and a cable to this process's namespace. Thread: one.

    Attributes:
        address: of the machine in this network; the supervisor listens there.
        fds: descriptors that a process must inherit to keep the network when this process is killed.

    Args:
        hosts: number of hosts.

    Raises:
        ConfigError: the network cannot be made here; the error says what is missing.
    """

    def __init__(self, hosts: int) -> None:
        if hosts > _MOST_HOSTS:
            raise ConfigError(f"--network-namespaces: room for {_MOST_HOSTS} hosts, not {hosts}")
        if find_spec("pyroute2") is None:
            raise ConfigError("--network-namespaces: pyroute2 is missing: pip install pyroute2")
        self._hosts: dict[int, Namespace] = {}
        self._network = _free_network()
        self._link = f"resil{secrets.token_hex(3)}"
        self._opened: list[Namespace] = []
        try:
            self._machine = self._open(new=False)
            self._switch = self._open(new=True)
            self._switch.add_bridge(_BRIDGE)
            self._switch.add_pair("machine", self._machine, self._link)
            self._switch.add_to_bridge(_BRIDGE, "machine")
            self._machine.set_address(self._link, self.address, _PREFIX)
            for number in range(hosts):
                self._add(number)
        except OSError as error:
            self.close()
            raise ConfigError(f"--network-namespaces: {_why(error)}") from error
        except BaseException:
            self.close()
            raise
        logger.info("hosts have namespaces of their own in the network %s", self._network)

    def _open(self, *, new: bool) -> Namespace:
        self._opened.append(Namespace(new=new))
        return self._opened[-1]

    def _add(self, number: int) -> None:
        host = self._hosts[number] = self._open(new=True)
        set_link_up(host.control, "lo", True)
        self._switch.add_pair(f"host{number}", host, _IN_HOST)
        self._switch.add_to_bridge(_BRIDGE, f"host{number}")
        host.set_address(_IN_HOST, self.address_of(number), _PREFIX)

    @property
    def address(self) -> str:
        return str(self._network[1])

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._switch.control.fileno(),)

    def address_of(self, number: int) -> str:
        return str(self._network[_FIRST_HOST + number])

    def cable_of(self, number: int) -> Cable:
        """The cable of a host. It uses this object's socket, so do not close it."""
        return Cable(self._switch.control, f"host{number}")

    def variables_of(self, name: str) -> Mapping[str, str]:
        """Environment variables for all processes of a host. They name the interface, because the machine's host name
        resolves to no address of the namespace. And they give NCCL a host id, because it would take all processes of
        one kernel for one host, and use shared memory, which no partition cuts."""
        interface = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        return dict.fromkeys(interface, _IN_HOST) | {"NCCL_HOSTID": name}

    @contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """Processes that are started inside this context belong to that host's namespace."""
        with within(self._hosts[number].fd):
            yield

    def close(self) -> None:
        """Cuts the machine off; processes in the hosts' namespaces stay connected until they have ended. Idempotent."""
        if not self._opened:
            return
        with suppress(OSError):  # the link was not made
            self._opened[0].remove(self._link)
        for one in self._opened:
            one.close()
        self._opened.clear()


def _why(error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return (
            "this user may make no network namespaces; run it as root (in a container with CAP_NET_ADMIN and"
            " CAP_SYS_ADMIN), or leave the flag out, so that all hosts share the network of this machine"
        )
    return (
        f"the kernel makes no namespace, veth pair or bridge ({error}); it needs CONFIG_NET_NS, and the modules veth"
        " and bridge (modprobe veth bridge); or leave the flag out, so that all hosts share the network of this machine"
    )


def _free_network() -> ipaddress.IPv4Network:
    """A network that this machine has no route to, except its default route.

    Raises:
        ConfigError: there is none.
    """
    taken = _routes()
    candidates = random.sample(list(_RANGE.subnets(new_prefix=_PREFIX)), 1 << (_PREFIX - _RANGE.prefixlen))
    for one in candidates:
        if not any(one.overlaps(route) for route in taken):
            return one
    raise ConfigError(f"--network-namespaces: this machine has routes to all of {_RANGE}; leave the flag out")


def _routes() -> list[ipaddress.IPv4Network]:
    with open("/proc/net/route") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    pairs = [[ipaddress.IPv4Address(int(row[at], 16).to_bytes(4, sys.byteorder)) for at in (1, 7)] for row in rows]
    return [ipaddress.IPv4Network(f"{address}/{mask}", strict=False) for address, mask in pairs if int(mask)]
