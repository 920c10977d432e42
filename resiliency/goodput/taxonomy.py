"""The buckets every second falls into: a closed list, in the order a report shows them.

Each second of each rank is in exactly one bucket. ``UNKNOWN`` is a bucket like the others: time the log does not
explain is shown there, not spread over the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["BUCKETS", "Bucket", "BucketInfo", "empty"]


class Bucket(str, Enum):
    """Name of a bucket as it stands in JSON."""

    PRODUCTIVE = "productive"
    FIRST_START = "first_start"
    DATA_WAIT = "data_wait"
    LOOP = "loop_overhead"
    CHECKPOINT_STALL = "checkpoint_stall"
    INTERFERENCE = "interference"
    LOST_WORK = "lost_work"
    DETECTION = "detection"
    RESTART = "restart"
    RESTORE = "restore"
    WARM_UP = "warm_up"
    SLOWDOWN = "slowdown"
    STRAGGLER = "straggler"
    SCALED_DOWN = "scaled_down"
    IDLE = "idle"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class BucketInfo:
    """How a report shows a bucket.

    Attributes:
        label: short name for tables.
        meaning: one sentence: which seconds are counted here.
        lever: what makes it smaller, "" when nothing can.
        light: colour on a light page.
        dark: colour on a dark page.
    """

    label: str
    meaning: str
    lever: str
    light: str
    dark: str


BUCKETS: dict[Bucket, BucketInfo] = {
    Bucket.PRODUCTIVE: BucketInfo(
        label="Productive",
        meaning="Steps that were kept, at the usual step time, and validation.",
        lever="",
        light="#1a7f4b",
        dark="#3fbf7f",
    ),
    Bucket.FIRST_START: BucketInfo(
        label="First start",
        meaning="From being scheduled to the first batch of the first attempt.",
        lever="Smaller images, cached compilation, faster rendezvous.",
        light="#2f7fc8",
        dark="#6db3f2",
    ),
    Bucket.DATA_WAIT: BucketInfo(
        label="Data wait",
        meaning="The step waited for its batch.",
        lever="More loader workers, prefetching, a closer data set.",
        light="#0f9aa3",
        dark="#43cfd0",
    ),
    Bucket.LOOP: BucketInfo(
        label="Loop overhead",
        meaning="Between two batches, without the wait for data: callbacks, loggers, moving the batch to its device.",
        lever="Lighter callbacks, rarer logging, pinned memory.",
        light="#4f6d8f",
        dark="#9fb9d9",
    ),
    Bucket.CHECKPOINT_STALL: BucketInfo(
        label="Checkpoint stall",
        meaning="Training stood still for a save: the eager part, the fence, the final save.",
        lever="Lazy snapshots, a faster local tier, fewer saves.",
        light="#a8660f",
        dark="#e39a2f",
    ),
    Bucket.INTERFERENCE: BucketInfo(
        label="Save interference",
        meaning="Steps were slower than usual while a save was in flight.",
        lever="Fewer writer threads, a bandwidth limit, another disk.",
        light="#e0a800",
        dark="#ffd84d",
    ),
    Bucket.LOST_WORK: BucketInfo(
        label="Lost work redone",
        meaning="Steps that were thrown away by a failure and had to be run again.",
        lever="Save more often on a tier that survives this failure.",
        light="#c0362c",
        dark="#ff6b5e",
    ),
    Bucket.DETECTION: BucketInfo(
        label="Detection",
        meaning="From the last sign of progress until something noticed the failure.",
        lever="Heartbeats and exit monitoring instead of collective timeouts.",
        light="#dd4f80",
        dark="#ff8fb5",
    ),
    Bucket.RESTART: BucketInfo(
        label="Restart",
        meaning="From noticing a failure until the new attempt is ready to load or train.",
        lever="Restart in the job, warm spares, faster rendezvous.",
        light="#9b3fb5",
        dark="#d68af0",
    ),
    Bucket.RESTORE: BucketInfo(
        label="Restore",
        meaning="Loading a checkpoint.",
        lever="Restore from memory or local disk; read once and broadcast.",
        light="#6654c9",
        dark="#a596ff",
    ),
    Bucket.WARM_UP: BucketInfo(
        label="Warm-up",
        meaning="First steps of an attempt beyond the usual step time.",
        lever="Compilation caches, pre-opened data, warmed allocators.",
        light="#d97f4e",
        dark="#ffb38a",
    ),
    Bucket.SLOWDOWN: BucketInfo(
        label="Slowdown",
        meaning="Steps that were slower for long than the best stable ones of the same rank and size.",
        lever="Compare clocks, temperatures and neighbours of the hosts before and after.",
        light="#8f5a78",
        dark="#d3a0bf",
    ),
    Bucket.STRAGGLER: BucketInfo(
        label="Straggler excess",
        meaning="Everyone waited for a slower rank.",
        lever="Swap the slow host named in the straggler table.",
        light="#7b4b2a",
        dark="#c4875f",
    ),
    Bucket.SCALED_DOWN: BucketInfo(
        label="Scaled-down capacity",
        meaning="Ranks that were missing while the rest trained on.",
        lever="Spares, or scaling up again sooner.",
        light="#6b7f3a",
        dark="#b5cc6a",
    ),
    Bucket.IDLE: BucketInfo(
        label="Idle",
        meaning="The job had nothing to run: shut-down, and time after a normal end.",
        lever="Release the hosts, or queue the next job.",
        light="#8a94a3",
        dark="#8b97a8",
    ),
    Bucket.UNKNOWN: BucketInfo(
        label="Unknown",
        meaning="No event explains this time.",
        lever="Log from every rank; read the incidents for the largest gaps.",
        light="#3d4653",
        dark="#c3ccd8",
    ),
}


def empty() -> dict[Bucket, int]:
    """A zero for each bucket, in report order."""
    return dict.fromkeys(BUCKETS, 0)
