"""Fills one rank's time line for an attempt that has steps: start, restore, training, and the time after it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from resiliency.goodput.finer import Trained
from resiliency.goodput.lanes import Lane, us
from resiliency.goodput.slowdown import Best
from resiliency.goodput.split import Stragglers, TrainingSplit, split_training
from resiliency.goodput.start_parts import StartPart
from resiliency.goodput.taxonomy import Bucket
from resiliency.goodput.timing import Timing
from resiliency.telemetry.facts import Segment

__all__ = ["LaneFiller"]


class LaneFiller:
    """Adds one attempt that has steps to one rank's time line. ``over`` is True when the log has the end of the job."""

    def __init__(self, lane: Lane, timing: Timing, late: Stragglers, best: Best, *, over: bool) -> None:
        self.lane = lane
        self.timing = timing
        self.late = late
        self.best = best
        self.over = over
        self.start_bucket = Bucket.FIRST_START if timing.index == 0 else Bucket.RESTART

    def fill(self, pieces: Sequence[Segment]) -> list[TrainingSplit]:
        lane, timing = self.lane, self.timing
        parts: list[TrainingSplit] = []
        if not pieces:
            if timing.train is not None:
                lane.until(us(timing.train), self.start_bucket, "start")
                lane.until(us(timing.progress), Bucket.SCALED_DOWN, "absent")
            lane.until(us(timing.progress), self.start_bucket, "start")
        trained = False
        for segment in pieces:
            part = self._piece(segment, rejoined=trained, pieces=len(pieces))
            trained = trained or segment.train is not None or segment.steps.high >= 0
            if part is not None:
                parts.append(part)
        if timing.train is not None and pieces:
            behind = us(timing.progress) - lane.cursor
            if behind > us(max(1.0, 3 * (timing.usual_step_s or 0.0))):
                gone = bool(parts) or any(mark.rank == lane_of(pieces) and "lost" in mark.kind for mark in timing.marks)
                lane.until(us(timing.progress), Bucket.SCALED_DOWN if gone else Bucket.UNKNOWN, "absent")
        self._tail(pieces)
        return parts

    def _piece(self, segment: Segment, *, rejoined: bool, pieces: int) -> TrainingSplit | None:
        lane, timing = self.lane, self.timing
        train = segment.train if segment.train is not None else segment.first_step_start()
        last = segment.last_step_time()
        if rejoined:
            if train is not None:
                lane.until(us(train), Bucket.SCALED_DOWN, "absent")
        elif train is not None:
            self._start(segment, train)
        else:
            ended = segment.end
            self._restore(segment, ended)
            lane.until(
                us(min(timing.progress, ended if ended is not None else timing.progress)), self.start_bucket, "start"
            )
        if last is None or train is None:
            return None
        part = split_training(segment, timing.usual_step_s, self.late, pieces, self.best)
        lost = segment.steps.share_after(timing.lost_above) if timing.lost_above is not None else 0.0
        kept = part.productive_s * (1.0 - lost)
        began = min(train, last)
        lane.mixed(
            us(last),
            [
                (Bucket.PRODUCTIVE, kept + part.eval_s),
                (Bucket.LOST_WORK, part.productive_s - kept),
                (Bucket.DATA_WAIT, part.data_wait_s),
                (Bucket.LOOP, part.loop_s),
                (Bucket.CHECKPOINT_STALL, part.stall_s),
                (Bucket.INTERFERENCE, part.interference_s),
                (Bucket.WARM_UP, part.warm_up_s),
                (Bucket.UNKNOWN, part.slow_s),
                (Bucket.SLOWDOWN, part.slowdown_s),
                (Bucket.STRAGGLER, part.straggler_s),
                (Bucket.STRAGGLER, min(part.straggler_gap_s, max(0.0, last - began - part.step_s))),
            ],
            Bucket.UNKNOWN,
            "train",
            whole_us=us(last) - us(began),
            trained=Trained(segment, began, timing.lost_above, tuple(part.slow)),
        )
        return part

    def _start(self, segment: Segment, train: float) -> None:
        """Fills the time from the start of the attempt to the first batch."""
        lane = self.lane
        imported = None
        if segment.process is not None and segment.callback is not None and segment.imports_s is not None:
            imported = min(segment.process + segment.imports_s, segment.callback)
        marks = [
            (StartPart.PROCESSES, segment.process),
            (StartPart.IMPORTS, imported),
            (StartPart.IMPORTS if imported is None else StartPart.SCRIPT, segment.callback),
            (StartPart.GROUP, segment.group),
            (StartPart.RENDEZVOUS, segment.grouped),
            (StartPart.GROUP, segment.opening),
            (StartPart.AGENT, segment.started if segment.opening is not None else None),
        ]
        rest = StartPart.OTHER
        for part, time in marks:
            if time is not None and time <= train:
                lane.until(us(time), self.start_bucket, "start", part)
                rest = StartPart.MODEL
        restored = self._restore(segment, train, rest)
        if restored and rest is StartPart.MODEL:
            rest = StartPart.FIRST_BATCH
        lane.until(us(train), self.start_bucket, "start", rest)

    def _restore(self, segment: Segment, before: float | None, part: StartPart = StartPart.OTHER) -> bool:
        """Splits off the part of the start-up that loaded a checkpoint. Returns False when no load is logged before
        ``before``."""
        lane = self.lane
        loaded = segment.loaded
        if loaded is None or (before is not None and loaded > before):
            return False
        began = segment.restore
        if began is None or began > loaded:
            began = loaded - (segment.loaded_s or 0.0)
        lane.until(us(began), self.start_bucket, "start", part)
        lane.until(us(loaded), Bucket.RESTORE, "restore")
        return True

    def _tail(self, pieces: Sequence[Segment]) -> None:
        """Fills the time from the end of the last step to the start of the next attempt."""
        lane, timing = self.lane, self.timing
        stop = us(timing.window[1])
        if timing.outcome in ("finished", "planned"):
            idle = Bucket.IDLE if timing.outcome == "finished" or self.over else Bucket.RESTART
            stall = 0.0
            if pieces:
                after = pieces[-1].last_step_time()
                stall = sum(seconds for time, seconds in pieces[-1].stalls if after is None or time > after)
            if timing.ended is not None:
                lane.mixed(us(timing.ended), [(Bucket.CHECKPOINT_STALL, stall)], idle, "end")
            lane.until(stop, idle, "idle" if idle is Bucket.IDLE else "restart")
        elif timing.outcome == "open":
            lane.until(stop, Bucket.UNKNOWN, "open")
        else:
            if timing.noticed is not None:
                lane.until(us(timing.noticed), Bucket.DETECTION, "detection")
            over = self.over and timing.window[1] == lane.end_us / 1e6
            part = StartPart.OTHER
            if timing.relaunched is not None and not over:
                lane.until(us(timing.relaunched), Bucket.RESTART, "restart", StartPart.RANKS_END)
                part = StartPart.PROCESSES
            lane.until(stop, Bucket.IDLE if over else Bucket.RESTART, "restart", part)


def lane_of(pieces: Sequence[Segment]) -> int:
    return pieces[0].lane
