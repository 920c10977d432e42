"""Accounts for an attempt whose log has no steps, from starts, loads and saves alone (the older library's six
events). Pure."""

from __future__ import annotations

from resiliency.goodput.lanes import Lane, us
from resiliency.goodput.taxonomy import Bucket
from resiliency.goodput.timing import Timing

__all__ = ["fill_coarse", "lost_share"]


def lost_share(timing: Timing, train: float) -> float:
    """Share, in [0, 1], of the time from the start of training to the last save whose work later attempts had to run
    again.

    Args:
        train: start of training in UTC seconds, known or estimated.
    """
    if timing.lost_above is None or not timing.saves:
        return 0.0
    points = [(train, timing.position or 0)]
    points += [(time, step) for time, step in timing.saves if step > points[-1][1] and time >= points[-1][0]]
    whole = points[-1][0] - points[0][0]
    lost = 0.0
    for (t0, s0), (t1, s1) in zip(points, points[1:], strict=False):
        if s1 > timing.lost_above and s1 > s0:
            lost += (t1 - t0) * (s1 - max(s0, timing.lost_above)) / (s1 - s0)
    return min(1.0, lost / whole) if whole > 0 else 0.0


def fill_coarse(lane: Lane, timing: Timing, *, present: bool, pace: float | None, last: bool) -> None:
    """Adds one attempt to one host's time line.

    After the last save the log is silent. When the attempt failed, the silence counts as lost work for at most one
    usual interval between saves, because training that went on longer would have saved again. The rest counts as
    detection until the failure was noticed, and as restart when nothing in the log shows that.

    Args:
        present: the host took part in this attempt.
        pace: usual seconds between saves.
        last: no attempt follows.
    """
    start = Bucket.FIRST_START if timing.index == 0 else Bucket.RESTART
    stop = timing.window[1]
    train = timing.train
    if train is None and timing.saves:
        # Without a load, the time to the first save also contains the start-up; the usual interval between saves tells
        # how much of it was training.
        first = timing.saves[0][0]
        train = max(timing.window[0], first - pace) if pace is not None else timing.window[0]
    if train is None:
        train = timing.progress
    lane.until(us(train), start, "start")
    if not present:
        lane.until(us(timing.progress), Bucket.SCALED_DOWN, "absent")
    share = lost_share(timing, train)
    whole = max(0.0, timing.progress - train)
    claims = [(Bucket.PRODUCTIVE, whole * (1.0 - share)), (Bucket.LOST_WORK, whole * share)]
    lane.mixed(us(timing.progress), claims, Bucket.PRODUCTIVE, "train")
    if last and timing.outcome in ("finished", "planned") and timing.ended is not None:
        lane.until(us(timing.ended), Bucket.UNKNOWN, "open")
        lane.until(us(stop), Bucket.IDLE, "idle")
    elif timing.outcome == "finished":
        lane.until(us(stop), Bucket.IDLE, "idle")
    elif timing.outcome == "open":
        lane.until(us(stop), Bucket.UNKNOWN, "open")
    else:
        noticed = timing.noticed if timing.noticed is not None else stop
        trained = timing.train is not None or bool(timing.saves)
        if trained and timing.noticed is not None:
            silence = noticed - timing.progress
            lane.until(
                us(timing.progress + min(silence, pace if pace is not None else silence)), Bucket.LOST_WORK, "train"
            )
            lane.until(us(noticed), Bucket.DETECTION, "detection")
        elif trained:
            silence = stop - timing.progress
            lane.until(us(timing.progress + min(silence, pace if pace is not None else 0.0)), Bucket.LOST_WORK, "train")
        lane.until(us(stop), Bucket.RESTART, "restart")
