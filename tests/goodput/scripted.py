"""Scripted jobs with known truth: the script writes the events and books every rank's seconds as it goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from resiliency.events import Event, EventKind
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.reader import LogReader

START = 1_760_000_000.0
STEP_S = 2.0


@dataclass
class Job:
    """A synchronous job. Every ``advance`` books its seconds for the ranks it names."""

    ranks: int = 4
    run: str = "job"
    now: float = START
    step: int = 0
    attempt: int = -1
    ranks_per_host: int = 1
    skew: dict[str, float] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    truth: dict[Bucket, float] = field(default_factory=lambda: defaultdict(float))
    alive: int = 0
    training: bool = False

    def host(self, rank: int) -> str:
        return self.hosts.get(rank, f"host-{rank // self.ranks_per_host}")

    def emit(self, kind: str, rank: int, *, step: int | None = None, at: float | None = None, **fields: object) -> None:
        time = (self.now if at is None else at) + self.skew.get(self.host(rank), 0.0)
        mono = (self.now if at is None else at) - START + 1000.0
        self.events.append(
            Event(
                kind=kind,
                time=time,
                monotonic_s=mono,
                run=self.run,
                attempt=max(self.attempt, 0),
                rank=rank,
                host=self.host(rank),
                step=step,
                fields=fields,
            )
        )

    def advance(self, seconds: float, bucket: Bucket, *, ranks: int | None = None) -> None:
        """Time passes for every rank of the full job; those not alive book scaled-down capacity."""
        count = self.alive if ranks is None else ranks
        self.truth[bucket] += seconds * count
        if self.training:
            self.truth[Bucket.SCALED_DOWN] += seconds * (self.ranks - count)
        else:
            self.truth[bucket] += seconds * (self.ranks - count)
        self.now += seconds

    def start(
        self, *, ranks: int | None = None, startup: float = 30.0, restore: float = 0.0, load: int | None = None
    ) -> None:
        """A new attempt: start-up, maybe a restore, then training begins."""
        self.attempt += 1
        self.alive = self.ranks if ranks is None else ranks
        self.training = False
        bucket = Bucket.FIRST_START if self.attempt == 0 else Bucket.RESTART
        for rank in range(self.alive):
            self.emit(EventKind.JOB_STARTED, rank, world_size=self.alive, boot=f"boot of {self.host(rank)}")
        self.advance(startup, bucket)
        if load is not None:
            for rank in range(self.alive):
                self.emit(EventKind.RESTORE_STARTED, rank)
            self.advance(restore, Bucket.RESTORE)
            for rank in range(self.alive):
                self.emit(EventKind.CHECKPOINT_LOADED, rank, step=load, duration_s=restore, source="local")
            self.step = load
        for rank in range(self.alive):
            self.emit(EventKind.TRAIN_STARTED, rank, step=self.step, world_size=self.alive)
        self.training = True

    def steps(
        self,
        count: int,
        *,
        data: float = 0.0,
        stall: float = 0.0,
        loop: float = 0.0,
        extra: float = 0.0,
        extra_bucket: Bucket = Bucket.PRODUCTIVE,
        in_flight: bool = False,
        lost: bool = False,
        silent: Iterable[int] = (),
    ) -> None:
        """``count`` synchronous steps of STEP_S computing, plus the named extras."""
        quiet = set(silent)
        for _ in range(count):
            self.step += 1
            self.advance(data, Bucket.DATA_WAIT)
            self.advance(stall, Bucket.CHECKPOINT_STALL)
            self.advance(loop, Bucket.LOOP)
            self.advance(STEP_S, Bucket.LOST_WORK if lost else Bucket.PRODUCTIVE)
            self.advance(extra, extra_bucket)
            for rank in range(self.alive):
                if rank not in quiet:
                    self.emit(
                        EventKind.STEP,
                        rank,
                        step=self.step,
                        step_s=round(STEP_S + data + stall + loop + extra, 6),
                        data_wait_s=data,
                        stall_s=stall,
                        save_in_flight=in_flight,
                        **({"loop_s": loop} if loop else {}),
                    )

    def save(self, *, tier: str = "local") -> None:
        self.emit(EventKind.CHECKPOINT_SAVED, 0, step=self.step, tier=tier)

    def fail(self, *, detection: float, worker: int = 1, kind: str = EventKind.WORKER_LOST, **fields: object) -> None:
        """The job stops making progress now and a launcher notices ``detection`` seconds later."""
        self.training = False
        self.advance(detection, Bucket.DETECTION)
        launcher = Event(
            kind=kind,
            time=self.now,
            monotonic_s=5.0,
            run=self.run,
            attempt=self.attempt,
            rank=-1,
            host="launcher",
            fields={"worker": worker, **fields},
        )
        self.events.append(launcher)

    def finish(self) -> None:
        self.training = False
        for rank in range(self.alive):
            self.emit(EventKind.TRAIN_ENDED, rank, step=self.step)
            self.emit(EventKind.JOB_TERMINATED, rank, reason="finished")

    # -- reading it back -----------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        collector = Collector()
        for event in self.events:
            collector.add(event)
        return account(collector.runs[self.run])

    def write(self, folder: Path) -> None:
        """One file per rank, as the writers do."""
        for event in self.events:
            name = f"rank-{event.rank:05d}.jsonl" if event.rank >= 0 else "launcher.jsonl"
            with open(folder / name, "a") as file:
                file.write(event.to_json() + "\n")

    def read(self, folder: Path) -> Ledger:
        reader = LogReader()
        reader.read(sorted(folder.glob("*.jsonl")))
        return account(reader.collector.runs[self.run])


def assert_matches(ledger: Ledger, job: Job) -> None:
    """Sums are exact; every bucket is within 1 % of the truth or one step of all ranks."""
    assert sum(ledger.wall.values()) == ledger.wall_us
    assert sum(ledger.gpu.values()) == ledger.capacity * ledger.wall_us
    assert ledger.capacity == job.ranks
    assert all(amount >= 0 for amount in ledger.gpu.values())
    for lane in ledger.lanes:
        assert sum(interval.length_us for interval in lane.intervals) == ledger.wall_us
        assert all(sum(interval.parts.values()) == interval.length_us for interval in lane.intervals)
    for bucket in Bucket:
        truth, found = job.truth[bucket], ledger.gpu[bucket] / 1e6
        allowed = max(0.01 * truth, STEP_S * job.ranks)
        assert abs(found - truth) <= allowed, f"{bucket.value}: {found:.3f} GPU-s, truth {truth:.3f}"
