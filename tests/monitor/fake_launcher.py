"""A launcher that does what its test says: it takes places and has ranks that sleep. Standard library only, to be quick.

Arguments: name of the monitor's socket, path of the test's datagram socket, path of its own.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys


def send(end, message):
    fd = os.memfd_create("m")
    os.write(fd, message if isinstance(message, bytes) else json.dumps(message).encode())
    socket.send_fds(end, [b"m"], [fd])
    os.close(fd)


def receive(end):
    data, fds, _, _ = socket.recv_fds(end, 1, 8)
    if not data:
        return None
    with open(fds[0], "rb") as file:
        file.seek(0)
        return json.loads(file.read())


def fork_rank():
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        while True:
            signal.pause()
    return pid


def main():
    name, test, own = sys.argv[-3:]
    to_test = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    to_test.bind(own + f".{os.getpid()}")
    to_test.connect(test)
    monitor, generation, ranks = None, 0, {}
    standing = {"kind": "waiting", "generation": 0}

    def tell(**fields):
        to_test.send(json.dumps({"pid": os.getpid(), **fields}).encode())

    def told_to_end(number, frame):
        for pid in ranks.values():
            os.kill(pid, signal.SIGKILL)
        tell(event="ended")
        os._exit(143)

    signal.signal(signal.SIGTERM, told_to_end)
    tell(event="started", address=own + f".{os.getpid()}")
    while True:
        if monitor is None:
            monitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                monitor.connect("\0" + name)
                # A monitor that is being killed may close its connections before it closes the socket that listens.
                send(monitor, standing)
            except OSError:
                monitor.close()
                monitor = None
            else:
                tell(event="connected")
        readable, _, _ = select.select([to_test, *filter(None, [monitor])], [], [], 0.02 if monitor is None else None)
        if to_test in readable:
            command = json.loads(to_test.recv(65536))
            if command["do"] == "say":
                if command["message"].get("kind") in ("waiting", "running", "ended"):
                    standing = command["message"]
                if monitor is not None:
                    send(monitor, command["message"])
            elif command["do"] == "raw":
                send(monitor, bytes.fromhex(command["hex"]))
            elif command["do"] == "packet":
                monitor.send(b"nothing beside it")
            elif command["do"] == "exit":
                os._exit(command["status"])
        if monitor is not None and monitor in readable:
            try:
                message = receive(monitor)
            except OSError:
                message = None
            if message is None:
                monitor.close()
                monitor = None
                tell(event="disconnected")
                continue
            if message["kind"] == "place" and message["generation"] > generation:
                for pid in ranks.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                generation = message["generation"]
                first = message["node_rank"] * 2
                ranks = {first: fork_rank(), first + 1: fork_rank()}
                if message["node_rank"] == 0:
                    send(monitor, {"kind": "master", "generation": generation, "address": "127.0.0.1:29500"})
                standing = {
                    "kind": "running",
                    "generation": generation,
                    "ranks": {str(at): [rank, pid] for at, (rank, pid) in enumerate(ranks.items())},
                }
                send(monitor, standing)
            elif message["kind"] == "no_place":
                for pid in ranks.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                ranks = {}
                standing = {"kind": "waiting", "generation": generation}
                send(monitor, standing)
            tell(event="told", message=message, ranks=ranks)
            if message["kind"] == "completed":
                os._exit(0)


main()
