"""Network namespaces without names, which the kernel removes when nothing uses them any more, and links between them.

The links of a namespace are removed with it, and so is the other end of a veth pair, in whichever namespace it is, so
that no process has to survive to clear up.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Namespace", "is_own_namespace", "set_link_up", "within"]

_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


class Namespace:
    """A network namespace. It lasts as long as this object, or a process or socket in it. Thread: one.

    Attributes:
        fd: of the namespace, for :func:`within`.
        control: a socket in it. Whoever holds the socket keeps the namespace, and can change its links.

    Raises:
        OSError: EPERM: this process may not make one.
    """

    def __init__(self, *, new: bool) -> None:
        before = _own()
        try:
            if new:
                _call("unshare", _CLONE_NEWNET)
            try:
                self.fd = _own()
                self.control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            finally:
                if new:
                    _call("setns", before, _CLONE_NEWNET)
        finally:
            os.close(before)

    # Each of these methods raises OSError when the kernel refuses.

    def add_bridge(self, name: str) -> None:
        with self._links() as links:
            links.link("add", ifname=name, kind="bridge", state="up")

    def add_to_bridge(self, bridge: str, name: str) -> None:
        with self._links() as links:
            links.link("set", index=_index(links, name), master=_index(links, bridge), state="up")

    def add_pair(self, name: str, other: Namespace, others_name: str) -> None:
        """Makes two connected links (a veth pair), one here and one in another namespace."""
        with self._links() as links:
            links.link("add", ifname=name, kind="veth", peer={"ifname": others_name, "net_ns_fd": other.fd})

    def remove(self, name: str) -> None:
        with self._links() as links:
            links.link("del", ifname=name)

    def set_address(self, name: str, address: str, prefix: int) -> None:
        with self._links() as links:
            links.addr("add", index=_index(links, name), address=address, prefixlen=prefix)
            links.link("set", index=_index(links, name), state="up")

    @contextmanager
    def _links(self) -> Iterator[Any]:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            with within(self.fd), IPRoute() as links:
                yield links
        except NetlinkError as error:
            raise OSError(*error.args) from error

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.control.close()


def _index(links: Any, name: str) -> int:
    return int(links.link_lookup(ifname=name)[0])


@contextmanager
def within(fd: int) -> Iterator[None]:
    """Moves this thread, the processes it starts and the sockets it makes into another network namespace, while the
    context is open.

    Raises:
        OSError: EPERM: this process may not enter it.
    """
    before = _own()
    try:
        _call("setns", fd, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", before, _CLONE_NEWNET)
    finally:
        os.close(before)


def is_own_namespace(fd: int) -> bool:
    """Whether ``fd`` is the network namespace of this thread."""
    one, other = os.fstat(fd), os.stat(_OWN)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def set_link_up(control: socket.socket, name: str, up: bool) -> None:
    """Sets a link of the socket's namespace up or down, in whichever namespace this thread is.

    Raises:
        OSError: there is no such link, or this process may not change it.
    """
    flags = struct.unpack_from("H", fcntl.ioctl(control, _GET_FLAGS, _request(name)), 16)[0]
    fcntl.ioctl(control, _SET_FLAGS, _request(name, struct.pack("H", flags | _UP if up else flags & ~_UP)))


def _own() -> int:
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    # Python has os.setns and os.unshare since 3.12 only.
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _request(name: str, value: bytes = b"") -> bytes:
    """A struct ifreq."""
    return struct.pack("16s24s", name.encode(), value)
