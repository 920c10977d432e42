"""A launcher that trains nothing, and is quick to start: it takes places, has a rank that sleeps, and says that it makes
steps, until a file is there. Standard library only.

Arguments: name of the monitor's socket, the file.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time


def send(end, **message):
    fd = os.memfd_create("m")
    os.write(fd, json.dumps(message).encode())
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
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        while True:
            signal.pause()
    return pid


def main():
    name, finished = sys.argv[-2:]
    monitor, generation, rank, beats = None, 0, None, 0
    while True:
        if monitor is None:
            monitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                monitor.connect("\0" + name)
            except OSError:
                monitor = None
                time.sleep(0.02)
                continue
            send(monitor, kind="waiting", generation=generation)
        readable, _, _ = select.select([monitor], [], [], 0.1)
        try:
            message = receive(monitor) if readable else {}
            if message is None:
                raise ConnectionResetError
            if message.get("kind") == "completed":
                os._exit(0)
            if message.get("kind") in ("place", "no_place") and rank is not None:
                if message["kind"] == "no_place" or message["generation"] > generation:
                    os.kill(rank, signal.SIGKILL)
                    os.waitpid(rank, 0)
                    rank = None
            if message.get("kind") == "place" and message["generation"] > generation:
                generation, rank, beats = message["generation"], fork_rank(), 0
                send(monitor, kind="running", generation=generation, ranks={"0": [message["node_rank"], rank]})
            if message.get("kind") == "save":
                send(monitor, kind="saved", generation=generation, problem="nothing saves here")
            if rank is not None and os.waitpid(rank, os.WNOHANG)[0]:
                send(monitor, kind="lost", generation=generation, rank=0, signal=9)
                rank = None
            if rank is not None:
                beats += 1
                page = {"rank": 0, "beats": beats, "step": beats, "phase": "training", "watched": True}
                send(monitor, kind="pages", generation=generation, ranks=[page])
                if os.path.exists(finished):
                    send(monitor, kind="ended", generation=generation)
        except OSError:
            monitor = None


main()
