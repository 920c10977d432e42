"""Simulated host monitors, thousands in one process. They do as little as possible, because the supervisor is what is
measured."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import resource
import struct
import sys
import time
from typing import Any

from resiliency.runtime.messages.monitor import PROTOCOL_VERSION

__all__ = ["Host", "Hosts", "main"]


class Host(asyncio.Protocol):
    """A simulated monitor: takes every place it is given and reports its ranks there. The masking key of its WebSocket
    frames is zero, which is valid."""

    def __init__(self, owner: Hosts, name: str, ranks: int) -> None:
        self.owner, self.name, self.ranks = owner, name, ranks
        self.incarnation = f"{random.getrandbits(48):x}"
        self.transport: asyncio.Transport | None = None
        self.place: dict[str, Any] | None = None
        self.master = ""
        self.step = 0
        self.answered: set[tuple[int, int]] = set()
        self._buffer = b""
        self._upgraded = False
        self._number = random.randrange(10)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        transport.write(
            f"GET /v1/monitor HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.owner.lost(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._upgraded:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            if b" 101 " not in head.split(b"\r\n")[0]:
                raise RuntimeError(head.decode(errors="replace"))
            self._upgraded, self._buffer = True, rest
            hello = {"type": "Hello", "version": PROTOCOL_VERSION, "host": self.name, "incarnation": self.incarnation}
            self.send({**hello, "address": "10.0.0.1", "block": ""})
            asyncio.get_running_loop().call_later(random.random() * self.owner.period_s, self.beat)
        while len(self._buffer) >= 2:
            length, at = self._buffer[1] & 127, 2
            if length == 126:
                if len(self._buffer) < 4:
                    return
                length, at = struct.unpack_from(">H", self._buffer, 2)[0], 4
            elif length == 127:
                if len(self._buffer) < 10:
                    return
                length, at = struct.unpack_from(">Q", self._buffer, 2)[0], 10
            if len(self._buffer) < at + length:
                return
            kind, payload = self._buffer[0] & 15, self._buffer[at : at + length]
            self._buffer = self._buffer[at + length :]
            if kind == 1:
                self.hear(json.loads(payload))
            elif kind == 10:
                self.owner.times.append(time.monotonic() - struct.unpack("d", payload)[0])

    def hear(self, message: dict[str, Any]) -> None:
        if message["type"] == "Refused":
            raise RuntimeError(f"{self.name}: {message['reason']}")
        if message["type"] != "Desired":
            return
        for ask in message["asks"]:
            self.send({"type": "StepEnded", "plan": ask["plan"], "at": ask["at"], "generation": ask["generation"]})
        place = message["place"]
        self.master = place["master"] if place else ""
        if (place and place["generation"]) != (self.place and self.place["generation"]):
            self.place, self.step = place, 0
            self.owner.placed(self)
            self.report()

    def beat(self) -> None:
        if self.transport is None:
            return
        self.report()
        if self._number % 10 == 0:  # a ping sent after the report is answered once the report is handled
            self.transport.write(b"\x89\x88\0\0\0\0" + struct.pack("d", time.monotonic()))
        asyncio.get_running_loop().call_later(self.owner.period_s, self.beat)

    def report(self) -> None:
        place = self.place
        self._number += 1
        ranks = []
        if place is not None:
            self.step += bool(self.master) and self.owner.stalled != (place["workload"], place["generation"])
            first = place["node_rank"] * self.ranks
            ranks = [
                {
                    "rank": first + number,
                    "beats": self.step,
                    "step": self.step,
                    "phase": "training",
                    "watched": True,
                    "quiet_s": 0.251,
                    "longest_s": 0.312,
                    "stopped_s": 0.0,
                    "saved": self.step - self.step % 10,
                    "own_s": 0.125 * self.step,
                    "own_steps": self.step,
                }
                for number in range(self.ranks)
            ]
        self.send(
            {
                "type": "Report",
                "number": self._number,
                "workload": place["workload"] if place else "",
                "generation": place["generation"] if place else 0,
                "master": "10.0.0.1:29500" if place and place["node_rank"] == 0 else "",
                "ended": False,
                "preempted": False,
                "ranks": ranks,
                "problem": "",
            }
        )

    def lose_rank(self) -> None:
        place = self.place
        if place is None:
            return
        one = {
            "kind": "WORKER_LOST",
            "host": self.name,
            "workload": place["workload"],
            "generation": place["generation"],
        }
        one |= {"rank": place["node_rank"] * self.ranks, "device": "", "device_class": None, "detail": "signal 9"}
        self.send({"type": "Observed", "observations": [one]})

    def send(self, message: dict[str, Any]) -> None:
        if self.transport is None:
            return
        payload = json.dumps(message, separators=(",", ":")).encode()
        size = len(payload)
        head = bytes([0x81, 0x80 | size]) if size < 126 else b"\x81\xfe" + struct.pack(">H", size)
        self.transport.write(head + b"\0\0\0\0" + payload)


class Hosts:
    """All simulated monitors of a process. Each line of standard input is a command, answered by a line of output."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self.hosts: dict[str, Host] = {}
        self.generations: dict[str, int] = {}
        #: When a host was told of another place last, in monotonic seconds, which all processes of a machine share.
        self.told_s = 0.0
        #: Seconds from a report until it is known to be handled.
        self.times: list[float] = []
        #: A workload and generation that has lost a host, so that no rank of it makes a step.
        self.stalled: tuple[str, int] = ("", 0)

    def lost(self, host: Host) -> None:
        return

    def placed(self, host: Host) -> None:
        self.generations[host.name] = host.place["generation"] if host.place else 0
        self.told_s = time.monotonic()

    async def begin(self, address: tuple[str, int], names: list[str], ranks: int) -> None:
        loop = asyncio.get_running_loop()
        limit = asyncio.Semaphore(64)

        async def one(name: str) -> None:
            async with limit:
                self.hosts[name] = host = Host(self, name, ranks)
                await loop.create_connection(lambda: host, *address)

        await asyncio.gather(*map(one, names))

    def do(self, words: list[str]) -> str:
        if words[0] == "lose":
            for name in words[1:]:
                if name in self.hosts:
                    self.hosts[name].lose_rank()
        elif words[0] == "kill":
            self.stalled = words[2], int(words[3])
            transport = self.hosts[words[1]].transport if words[1] in self.hosts else None
            if transport is not None:
                transport.abort()
        if words[0] == "times":
            times, self.times = self.times, []
            return json.dumps([round(one, 6) for one in times])
        if words[0] == "told":
            return json.dumps(self.told_s)
        return "done"


async def main(host: str, port: int, first: int, count: int, ranks: int, period_s: float) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hosts = Hosts(period_s)
    await hosts.begin((host, port), [f"host-{number:05}" for number in range(first, first + count)], ranks)
    print("connected", flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(hosts.do(line.decode().split()), flush=True)


if __name__ == "__main__":
    asyncio.run(
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]))
    )
