"""Network namespaces without names, which the kernel removes when nothing uses them any more, and links between them.

Made with system calls and ioctls, so that no program (iproute2, util-linux) is needed. The links of a namespace are
removed with it, and so is the other end of a veth pair, in whichever namespace it is, so that no process has to survive
to clear up.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Namespace", "is_own_namespace", "set_link_up", "within"]

_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"
_ADD_BRIDGE, _ADD_TO_BRIDGE = 0x89A0, 0x89A2
_GET_FLAGS, _SET_FLAGS, _SET_ADDRESS, _SET_NETMASK, _GET_INDEX = 0x8913, 0x8914, 0x8916, 0x891C, 0x8933
_UP = 0x1
_LONGEST_NAME = 15
# Constants of rtnetlink.
_NEW_LINK, _DELETE_LINK, _ERROR = 16, 17, 2
_REQUEST, _ACK, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400
_NAME, _LINK_INFO, _KIND, _DATA, _PEER, _NAMESPACE_FD = 3, 18, 1, 2, 1, 28
_ANSWER_S = 10.0


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
                self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
                self._netlink.settimeout(_ANSWER_S)
            finally:
                if new:
                    _call("setns", before, _CLONE_NEWNET)
        finally:
            os.close(before)

    # Each of these methods raises OSError when the kernel refuses.

    def add_bridge(self, name: str) -> None:
        fcntl.ioctl(self.control, _ADD_BRIDGE, name.encode() + b"\0")
        set_link_up(self.control, name, True)

    def add_to_bridge(self, bridge: str, name: str) -> None:
        index = struct.unpack_from("i", fcntl.ioctl(self.control, _GET_INDEX, _request(name)), 16)[0]
        fcntl.ioctl(self.control, _ADD_TO_BRIDGE, _request(bridge, struct.pack("i", index)))
        set_link_up(self.control, name, True)

    def add_pair(self, name: str, other: Namespace, others_name: str) -> None:
        """Makes two connected links (a veth pair), one here and one in another namespace."""
        peer = _LINK + _attribute(_NAME, _text(others_name)) + _attribute(_NAMESPACE_FD, struct.pack("I", other.fd))
        info = _attribute(_KIND, b"veth") + _attribute(_DATA, _attribute(_PEER, peer))
        body = _LINK + _attribute(_NAME, _text(name)) + _attribute(_LINK_INFO, info)
        self._ask(_NEW_LINK, _CREATE | _EXCLUSIVE, body)

    def remove(self, name: str) -> None:
        self._ask(_DELETE_LINK, 0, _LINK + _attribute(_NAME, _text(name)))

    def set_address(self, name: str, address: str, netmask: str) -> None:
        for number, value in ((_SET_ADDRESS, address), (_SET_NETMASK, netmask)):
            packed = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(self.control, number, _request(name, packed))
        set_link_up(self.control, name, True)

    def _ask(self, kind: int, flags: int, body: bytes) -> None:
        self._netlink.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | _ACK | flags, 0, 0) + body)
        _, answer, *_, code = struct.unpack_from("=IHHIIi", self._netlink.recv(65536))
        if answer != _ERROR or code:
            raise OSError(-code, os.strerror(-code))

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.control.close()
        self._netlink.close()


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


def _text(name: str) -> bytes:
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name!r} is no name of a link: {_LONGEST_NAME} bytes at most")
    return name.encode() + b"\0"


def _request(name: str, value: bytes = b"") -> bytes:
    """A struct ifreq."""
    return struct.pack("16s24s", _text(name), value)


#: A struct ifinfomsg that names no link.
_LINK = bytes(16)


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)
