"""The status page: one HTML document that loads nothing from elsewhere. Needs jinja2 (extra ``supervisor``).

Its geometry is computed here. The script in it only fetches the page again, so the page can be read without scripts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import resources
from typing import Any

import jinja2

__all__ = ["render_page"]

_MOST_HOSTS = 300
_LEAST_SPAN_S, _MOST_SPAN_S = 300.0, 86_400.0
#: States that come first, so that a table that is cut shows every such host.
_NOT_WELL = ("silent", "quarantined", "cordoned", "joining")


def render_page(status: dict[str, Any], events: Sequence[dict[str, Any]]) -> str:
    """The page as HTML.

    Args:
        status, events: made by :mod:`resiliency.supervisor.views`; events oldest first.
    """
    now = time.time()
    began = min([one["opened_at"] for one in status["incidents"]], default=now)
    span_s = min(max(now - began, _LEAST_SPAN_S), _MOST_SPAN_S)
    hosts = sorted(status["hosts"], key=lambda host: (host["state"] not in _NOT_WELL, host["name"]))
    page: str = _template().render(
        title="Supervisor",
        css=_text("page.css"),
        status=status,
        events=events,
        now=now,
        began=now - span_s,
        span_s=span_s,
        lanes=[_lane(job["name"], status["incidents"], events, now, span_s) for job in status["workloads"]],
        hosts=hosts[:_MOST_HOSTS],
        hidden=len(hosts[_MOST_HOSTS:]),
        spares=sum(host["spare"] for host in hosts),
    )
    return page


def _lane(
    name: str, incidents: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], now: float, span_s: float
) -> dict[str, Any]:
    """A workload's row of the timeline: its incidents, and the plans in them from the history."""
    bars = [
        _bar("incident", one["opened_at"], one["closed_at"] or now, f"incident {one['number']}", now, span_s)
        for one in incidents
        if one["workload"] == name
    ]
    ends = {event["fields"]["plan"]: event for event in events if event["kind"] == "plan_ended"}
    for event in events:
        if event["kind"] == "restart_requested" and event["workload"] == name:
            end = ends.get(event["fields"]["plan"])
            helped = end is None or end["fields"]["outcome"] == "done"
            until = now if end is None else end["at"]
            bars.append(_bar("plan" if helped else "failed", event["at"], until, event["text"], now, span_s))
    return {"name": name, "bars": [bar for bar in bars if bar["left"] + bar["width"] > 0]}


def _bar(kind: str, began: float, ended: float, text: str, now: float, span_s: float) -> dict[str, Any]:
    left = max(0.0, 100 * (1 - (now - began) / span_s))
    right = 100 * (1 - (now - ended) / span_s)
    return {"kind": kind, "left": round(left, 3), "width": round(right - left, 3), "text": text}


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(duration=_duration, clock=_clock)
    return environment.from_string(_text("page.html.j2"))


@functools.cache
def _text(name: str) -> str:
    return (resources.files("resiliency.supervisor.page") / name).read_text(encoding="utf-8")


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, tz=timezone.utc).strftime("%H:%M:%S")
