"""Measures what heartbeats cost a step: ``python -m benchmarks.heartbeat``.

Each row is what the training thread does for one batch: the hooks of HeartbeatCallback and nothing else. The rows
differ in who is told: nobody, a folder in memory, and NVRx's rank monitor as well, whose client is replaced by one that
takes as long for a call as the real one. The rows without a callback are for training loops without Lightning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from resiliency.callbacks.heartbeat import HeartbeatCallback
from resiliency.plugins import rank_monitor
from resiliency.runtime import heartbeat
from resiliency.testing.rank_monitor import RankMonitorClientDouble

__all__ = ["Figures", "main", "measure"]

#: Seconds that a call of the real client takes, measured under ft_launcher 0.4.1.
_CLIENT_S = 300e-6
_PROMISE_S = 20e-6
_WARM_UP = 200


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Seconds of one batch. ``batches``: the number of measured batches."""

    batches: int
    median_s: float
    p99_s: float
    most_s: float


def measure(batch: Callable[[int], None], batches: int) -> Figures:
    """Times ``batches`` calls of ``batch``, after a warm-up; it gets the number of the batch."""
    times = []
    for number in range(batches + _WARM_UP):
        began = time.perf_counter()
        batch(number)
        took = time.perf_counter() - began
        if number >= _WARM_UP:
            times.append(took)
    times.sort()
    return Figures(
        median_s=statistics.median(times), p99_s=times[int(0.99 * len(times))], most_s=times[-1], batches=batches
    )


class _Trainer(SimpleNamespace):
    """The attributes of a trainer that the hooks read."""

    __hash__ = object.__hash__


def _nothing() -> None: ...


def _hooks(callback: Any) -> Callable[[int], None]:
    loop = SimpleNamespace(_on_before_fetch=_nothing, _on_after_fetch=_nothing)
    trainer = _Trainer(
        global_step=0,
        world_size=1,
        is_last_batch=False,
        sanity_checking=False,
        fit_loop=SimpleNamespace(epoch_loop=loop),
    )
    callback.on_train_start(trainer, None)

    def batch(number: int) -> None:
        loop._on_before_fetch()
        loop._on_after_fetch()
        callback.on_train_batch_start(trainer, None, None, number)
        callback.on_before_backward(trainer, None, None)
        trainer.global_step = number + 1
        callback.on_train_batch_end(trainer, None, None, None, number)

    return batch


@contextlib.contextmanager
def _published(folder: str | None) -> Iterator[None]:
    """Within the block this process publishes its heartbeat in ``folder``; None: nowhere."""
    with patch.object(heartbeat, "_own", {}):
        if folder is not None:
            heartbeat.publish(folder)
        yield


def _rows(folder: str, batches: int) -> Iterator[tuple[str, Figures]]:
    with _published(None):
        yield "beat(step), nobody is told", measure(heartbeat.beat, batches)
    with _published(folder):
        yield "beat(step), a folder", measure(heartbeat.beat, batches)
    with _published(None):
        yield "callback, nobody is told", measure(_hooks(HeartbeatCallback()), batches)
    with _published(folder):
        yield "callback, a folder", measure(_hooks(HeartbeatCallback()), batches)
    config = SimpleNamespace(rank_heartbeat_timeout=5.0, rank_section_timeouts={"step": 5.0})
    with _published(folder):
        callback = HeartbeatCallback()
        client = RankMonitorClientDouble(config, seconds=_CLIENT_S)
        callback._monitor = rank_monitor.RankMonitor(lambda: client)
        yield "callback, a folder and NVRx's rank monitor", measure(_hooks(callback), batches)
        callback._close_monitor(shutdown=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; 0 when the promise is kept, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50_000, help="measured in each row (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="heartbeats-") as folder:
        rows = list(_rows(folder, options.batches))
    table = Table(title=f"Microseconds of the training thread for one batch, of {options.batches}")
    for name in ("", "median", "99%", "most"):
        table.add_column(name, justify="left" if not name else "right")
    for name, row in rows:
        table.add_row(name, *(f"{1e6 * value:.1f}" for value in (row.median_s, row.p99_s, row.most_s)))
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({name: asdict(row) for name, row in rows}, indent=2))
    return int(any(row.median_s > _PROMISE_S for _, row in rows))


if __name__ == "__main__":
    sys.exit(main())
