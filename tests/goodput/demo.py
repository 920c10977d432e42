"""A run with one of everything, for the page, its screenshots and the benchmarks."""

from __future__ import annotations

import random

from resiliency.events import EventKind
from resiliency.goodput.taxonomy import Bucket

from .scripted import STEP_S, Job


class Demo(Job):
    """16 ranks on 4 hosts: a crash, a hang with a hot swap, a lost host, a planned scale-up, a straggler, failed saves."""

    rng = random.Random(1)

    def noisy(self, count: int, *, warm: float = 0.0, slow: int | None = None) -> None:
        """Steps with jitter, saves every 20 and a bit of everything."""
        rng = self.rng
        for _ in range(count):
            self.step += 1
            in_flight = self.step % 20 in (1, 2)
            data = 0.03 if rng.random() < 0.97 else 0.6
            stall = 0.05 if self.step % 20 == 0 else 0.0
            late = 0.35 if slow is not None else 0.0
            took = STEP_S * (1 + rng.gauss(0, 0.012)) + warm + (0.12 if in_flight else 0.0) + data + stall + late
            warm *= 0.4
            self.now += took
            for rank in range(self.alive):
                busy = 1.1 + rng.gauss(0, 0.01) + (late if rank == slow else 0.0)
                self.emit(
                    EventKind.STEP,
                    rank,
                    step=self.step,
                    step_s=round(took, 6),
                    data_wait_s=data,
                    stall_s=stall,
                    save_in_flight=in_flight,
                    busy_s=round(busy, 6),
                )
            if self.step % 20 == 0:
                self.saved()

    def saved(self) -> None:
        for rank in range(0, self.alive, self.ranks_per_host):
            for tier in ("local", "peer"):
                self.emit(EventKind.CHECKPOINT_SAVED, rank, step=self.step, tier=tier, bytes=9_000_000_000)
            self.emit(
                EventKind.CHECKPOINT_DURABLE,
                rank,
                step=self.step,
                tier="local",
                duration_s=round(1.4 + self.rng.random(), 3),
            )
        if self.step % 100 == 0:
            self.emit(EventKind.CHECKPOINT_SAVED, 0, step=self.step, tier="gcs", bytes=36_000_000_000)
            self.emit(
                EventKind.CHECKPOINT_DURABLE,
                0,
                step=self.step,
                tier="gcs",
                duration_s=round(40 + 20 * self.rng.random(), 2),
            )


def demo() -> Demo:
    job = Demo(ranks=16, run="llama-8b-pretrain", ranks_per_host=4)
    job.rng = random.Random(1)
    job.start(startup=95)
    job.noisy(900, warm=25)
    job.emit(EventKind.CHECKPOINT_FAILED, 4, step=900, tier="gcs", reason="503 from the object store", will_retry=True)
    job.noisy(333)
    job.fail(detection=2.5, worker=6, signal=9)
    job.advance(11, Bucket.RESTART)
    job.start(startup=18, restore=4, load=1220)
    job.noisy(600, warm=9)
    job.noisy(186, slow=9)
    job.fail(detection=47, kind=EventKind.HANG_DETECTED, worker=9, quiet_s=45.0)
    job.fail(
        detection=0, kind=EventKind.RESTART_REQUESTED, worker=9, remedy="swap host", reason="rank 9 hangs in all_reduce"
    )
    job.hosts.update({rank: "spare-0" for rank in (8, 9, 10, 11)})
    job.advance(26, Bucket.RESTART)
    job.start(startup=22, restore=6, load=2000)
    job.noisy(700, warm=10)
    job.fail(detection=5, kind=EventKind.HOST_LOST, worker=13, lost_host="host-3", reason="node not ready")
    job.start(ranks=12, startup=30, restore=9, load=2700)
    job.noisy(400, warm=12)
    job.training = False
    for rank in range(12):
        job.emit(EventKind.JOB_TERMINATED, rank, reason="signal")
    job.advance(8, Bucket.RESTART)
    job.start(ranks=16, startup=28, restore=9, load=3100)
    job.noisy(850, warm=11)
    job.emit(EventKind.CHECKPOINT_CORRUPT, 2, step=3900, tier="peer", path="step=3900/shard-00002")
    job.emit(EventKind.CHECKPOINT_REPAIRED, 2, step=3900, tier="peer", source="local")
    job.finish()
    return job
