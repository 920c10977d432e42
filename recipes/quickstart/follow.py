"""Follows the event logs of a run: its newest step and its processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Follower", "Record"]

Record = dict[str, Any]


class Follower:
    """Reads new lines of event logs as they are written. Thread: one.

    Args:
        logs: pattern of the log files below ``folder``.

    Attributes:
        records: all records read so far.
        workers: process id of each rank of the newest attempt.
        hosts: host of each rank of the newest attempt.
        attempt: number of the newest attempt, 0 before the first.
        step: newest step that the newest attempt finished; its restored step before that; 0 before both.
        begun: step that the newest attempt began at; None before its first step.
    """

    def __init__(self, folder: Path, logs: str = ".resiliency/*/events/*.jsonl") -> None:
        self._folder, self._logs = folder, logs
        self._read: dict[Path, int] = {}
        self._agents: dict[int, float] = {}
        self.records: list[Record] = []
        self.workers: dict[int, int] = {}
        self.hosts: dict[int, str] = {}
        self.attempt = 0
        self.step = 0
        self.begun: int | None = None

    @property
    def moved(self) -> bool:
        """True when the newest attempt has made a step."""
        return self.begun is not None

    @property
    def made(self) -> int:
        """Number of steps that the newest attempt has made."""
        return 0 if self.begun is None else self.step - self.begun

    def poll(self) -> list[Record]:
        """Records of the complete lines that were appended since the last call, oldest first."""
        fresh: list[Record] = []
        for path in self._folder.glob(self._logs):
            start = self._read.get(path, 0)
            if path.stat().st_size == start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._read[path] = start + len(complete)
            for line in complete.splitlines():
                try:
                    fresh.append(json.loads(line))
                except ValueError:
                    continue  # the torn last line of a process that was killed while it wrote
        fresh.sort(key=lambda record: record["monotonic_s"])
        for record in fresh:
            self._note(record)
        self.records += fresh
        return fresh

    def _note(self, record: Record) -> None:
        kind, attempt = record["event_type"], record["attempt"]
        if kind == "agent_started":
            self._agents[record["pid"]] = record["monotonic_s"]
        if kind == "job_started":
            if attempt > self.attempt:
                self.attempt, self.workers, self.hosts, self.step, self.begun = attempt, {}, {}, 0, None
            self.workers[record["rank"]] = record["pid"]
            self.hosts[record["rank"]] = record.get("host", "")
        elif attempt == self.attempt and kind == "checkpoint_loaded":
            self.step = record["step"]
        elif attempt == self.attempt and kind == "step":
            self.step = max(self.step, record["step"])
            if self.begun is None:
                self.begun = record["step"] - record.get("count", 1)

    def living_agents(self) -> list[psutil.Process]:
        """The host agents of this run that still run, newest last."""
        living = []
        for pid in sorted(self._agents, key=self._agents.__getitem__):
            try:
                process = psutil.Process(pid)
                if "resiliency" in " ".join(process.cmdline()):  # not a later process with the same id
                    living.append(process)
            except psutil.NoSuchProcess:
                continue
        return living
