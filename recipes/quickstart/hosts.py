"""Runs the job on several hosts, all on this machine, under a supervisor, and does to them what the demo shows."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from types import TracebackType

import psutil

from recipes.quickstart.launch import Launch, kill_all
from recipes.quickstart.story import Deed, DeedKind
from resiliency.errors import ResiliencyError
from resiliency.events import boot_seconds
from resiliency.supervisor.client import OperatorClient

__all__ = ["Hosts"]


class Hosts:
    """``resiliency run --nnodes N-1:N --spares 1``, one rank a host. Thread: one. Use as a context manager.

    Supervisor, hosts and ranks write into one folder only: their state to ``cluster``, their event logs to ``events``.

    Args:
        args: the arguments of the demo.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.full = args.hosts
        self._state = folder / "cluster"
        self._enough = folder / "enough"
        flags = ["--nnodes", f"{args.hosts - 1}:{args.hosts}", "--spares", "1", "--nproc-per-node", "1"]
        flags += ["--state-dir", str(self._state)]
        settings = {
            "heartbeat_polling_period_s": args.heartbeat_timeout / 4,
            "heartbeat_timeout_s": args.heartbeat_timeout,
            "quarantine_s": args.quarantine,
            "dwell_s": args.dwell,
        }
        for name, value in settings.items():
            flags += ["--supervisor-set", f"{name}={value:g}"]
        arguments = ["--ranks", str(args.hosts), "--every", str(args.every), "--steps", "2000"]
        arguments += ["--until", str(self._enough)]
        if args.data:
            arguments += ["--data", str(Path(args.data).resolve())]
        self.launch = Launch(
            folder,
            flags,
            arguments,
            deadline_s=args.deadline,
            variables={"RESILIENCY_EVENTS_DIR": str(folder / "events"), "RESILIENCY_NODE": "host"},
            logs="events/*.jsonl",
        )
        self.follower = self.launch.follower
        self.deeds: list[Deed] = []
        self._lost: list[str] = []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.launch.stop()

    def is_full(self) -> bool:
        """True when every place has a host and the ranks have ended a step."""
        return self.follower.moved and len(self.follower.workers) == self.full

    def ready(self) -> set[str]:
        """Hosts that have passed their check, by the supervisor's status; none while it does not answer. Blocks: up to
        10 s."""
        try:
            address = (self._state / "address").read_text()
            token = (self._state / "operator-token").read_text()
            status = OperatorClient(f"http://{address}", token=token).get("/v1/status")
        except (OSError, ResiliencyError):
            return set()  # the supervisor does not answer yet
        return {host["name"] for host in status["hosts"] if host["state"] == "ready"}

    def kill(self, host: str) -> Deed:
        """Kills all processes of a host at once, as when its power fails."""
        monitor = self._monitor_of(host)
        deed = self._note(DeedKind.KILL, host)
        kill_all([monitor, *monitor.children(recursive=True)])
        self._lost.append(host)
        return deed

    def bring_back(self) -> Deed:
        """Starts the host again that was killed last."""
        deed = self._note(DeedKind.RETURN, self._lost.pop())
        os.kill(self.launch.pid, signal.SIGUSR2)
        return deed

    def end(self) -> None:
        """Tells the training to end after its current step."""
        self._enough.touch()

    def _note(self, kind: DeedKind, host: str) -> Deed:
        follower = self.follower
        deed = Deed(
            kind=kind,
            host=host,
            time_s=boot_seconds(),
            step=follower.step,
            attempt=follower.attempt,
            ranks=len(follower.workers),
        )
        self.deeds.append(deed)
        return deed

    def _monitor_of(self, host: str) -> psutil.Process:
        for process in psutil.Process(self.launch.pid).children():
            words = process.cmdline()
            if "host-monitor" in words and words[words.index("--host") + 1] == host:
                return process
        raise SystemExit(f"{host} does not run; see the end of {self.launch.folder / 'output.log'}")
