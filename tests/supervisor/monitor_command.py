"""``resiliency host-monitor`` as a process of its own, with a launcher that is quick to start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil


class MonitorCommand:
    """``resiliency host-monitor`` with a launcher that is quick to start; its rank makes steps and its pid is known."""

    def __init__(self, folder: Path, *supervisor: str, host: str = "a", **variables: str) -> None:
        launcher = str(Path(__file__).parents[1] / "quick_launcher.py")
        code = (
            "import sys; from resiliency.monitor import settings as m;"
            f"m.launcher_command = lambda *a, **k: (sys.executable, '-S', '-E', {launcher!r}, '{{endpoint}}',"
            f" {str(folder / 'finished')!r}); from resiliency.cli.host_monitor import main; sys.exit(main(sys.argv[1:]))"
        )
        words = [*supervisor, "--host", host, "--state-dir", str(folder / f"host-{host}")]
        words += ["--watchdog", "none", "--grace", "2", "--stop-timeout", "2"]
        self.log = folder / f"monitor-{host}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *words, "--", "train.py"],
                env={**os.environ, **variables},
                stderr=log,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """Processes of ranks: children of the launcher."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return sorted(each.pid for each in children if each.ppid() != self.process.pid)
        return []

    def text(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        return self.log.read_text()

    def end(self) -> None:
        known = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        finally:
            for each in known:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            self.process.kill()
            self.process.wait(10)


@contextlib.contextmanager
def monitor(folder: Path, *supervisor: str, **given: str) -> Iterator[MonitorCommand]:
    made = MonitorCommand(folder, *supervisor, **given)
    try:
        yield made
    finally:
        made.end()
