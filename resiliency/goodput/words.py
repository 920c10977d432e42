"""Lengths of time and shares as people read them. Pure."""

from __future__ import annotations

__all__ = ["duration", "figure", "precise"]


def duration(seconds: float) -> str:
    """A readable length of time: ``3 d 04 h``, ``2 h 05 m``, ``4 m 10 s``, ``8.2 s``, ``120 ms``."""
    sign = "-" if seconds < 0 else ""
    seconds = abs(seconds)
    if seconds < 0.9995:
        return f"{sign}{seconds * 1e3:.0f} ms" if seconds >= 0.0005 else "<1 ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{sign}{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{sign}{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{sign}{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{sign}{whole // 86400} d {whole % 86400 // 3600:02d} h"


def precise(seconds: float) -> str:
    """A step time with three digits. Less than half a microsecond is shown as 0, because logs have microseconds."""
    if seconds >= 100 or seconds < 5e-7:
        return duration(seconds if seconds >= 100 else 0.0)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def figure(share: float) -> str:
    """A share in percent; small shares get more digits, so that only zero is printed as 0 %."""
    percent = share * 100
    if percent == 0 or abs(percent) >= 0.095:
        return f"{percent:.1f} %"
    return f"{percent:.3f} %" if abs(percent) >= 0.0005 else "<0.001 %"
