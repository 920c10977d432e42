"""One self-contained HTML page: no script from elsewhere, no font, no network. Needs jinja2 (extra ``goodput``).

All geometry is computed here and written as percentages, so that the page needs no script to be
read and fits any width; the small script in the template only switches the theme and moves the tooltip.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from resiliency.errors import ConfigError
from resiliency.goodput.lanes import LaneInterval
from resiliency.goodput.ledger import LaneAccount, Ledger
from resiliency.goodput.named_spans import spans_of
from resiliency.goodput.over_time import COLUMNS, ROLLING
from resiliency.goodput.summary import iso, step_series
from resiliency.goodput.table import duration, figure, largest_causes, precise, unit_word
from resiliency.goodput.taxonomy import BUCKETS, Bucket
from resiliency.telemetry.text_file import replace_text

__all__ = ["render_page", "write_page"]

#: A row of the time line is drawn with at most this many pieces.
MOST_PIECES = 240
MOST_HOSTS = 24
MOST_ATTEMPTS = 60
MOST_INCIDENTS = 100
#: Rows that are shown at once, those that cost the most; the reader opens the others.
ATTEMPTS_OPEN = 3
INCIDENTS_OPEN = 3
#: At most this many spans, and attempts, are drawn on the time line: the longest ones.
MOST_SPANS = 200
MOST_ATTEMPTS_DRAWN = 400
#: Width of an incident's number in percent of the time line, on a wide page and on a phone. A number that would overlap
#: another one becomes a dot.
NUMBER_WIDE, NUMBER_NARROW = 2.1, 6.0
#: In the plot of step times: at most this many stretches with saves in flight, and steps beyond the scale (longest).
MOST_FLIGHTS, MOST_CUT = 500, 60
#: A beginning that all host names share is left out when it is longer than this many letters.
LONG_BEGINNING = 6
PLOT_WIDTH, PLOT_HEIGHT = 1000, 160
CURVE_WIDTH, CURVE_HEIGHT = 1000, 100
_BY_PHASE = {"absent": Bucket.SCALED_DOWN, "open": Bucket.UNKNOWN, "idle": Bucket.IDLE, "restore": Bucket.RESTORE}


def render_page(runs: Sequence[tuple[dict[str, Any], Ledger]]) -> str:
    """The page for one or more runs.

    Args:
        runs: each run's summary with its ledger.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        import jinja2
        from markupsafe import Markup, escape
    except ImportError as error:
        raise ConfigError("the HTML page needs jinja2; install resiliency[goodput] or use --json") from error
    home = resources.files("resiliency.goodput")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(duration=duration, precise=precise, figure=figure, clock=lambda time: iso(time)[11:16])
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
    template = environment.from_string((home / "page.html.j2").read_text(encoding="utf-8"))
    buckets = [{"name": bucket.value, **vars(info)} for bucket, info in BUCKETS.items()]
    views = [_view(summary, ledger) for summary, ledger in runs]
    text: str = template.render(runs=views, buckets=buckets, css=(home / "page.css").read_text(encoding="utf-8"))
    return text


def write_page(path: str | os.PathLike[str], runs: Sequence[tuple[dict[str, Any], Ledger]]) -> None:
    """Writes the page to a temp file and renames it, so that a reader sees the old page or the new one. Creates the
    folder if needed.

    Raises:
        ConfigError: jinja2 is not installed.
        OSError: the page cannot be written.
    """
    text = render_page(runs)
    if not (folder := Path(path).parent).exists():
        folder.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def _view(summary: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
    """The data of one run that the template needs."""
    start, wall = ledger.start, max(1e-6, ledger.end - ledger.start)
    incidents = sorted(summary["incidents"], key=lambda row: -row["cost_gpu_s"])[:MOST_INCIDENTS]
    dearest = {row["time"] for row in incidents[:INCIDENTS_OPEN]}
    listed = []
    for number, row in enumerate(sorted(incidents, key=lambda row: row["time"]), start=1):
        parts = sorted(row["gpu_s"].items(), key=lambda item: -item[1])
        costs = [
            {"bucket": name, "label": BUCKETS[Bucket(name)].label, "seconds": seconds}
            for name, seconds in parts
            if seconds
        ]
        listed.append(
            {
                **row,
                "shown": row["time"] in dearest,
                "number": number,
                "left": _percent(row["time"] - start, wall),
                "costs": costs,
                "files": [{"name": Path(path).name, "path": path, "uri": _uri(path)} for path in row["logs"]],
            }
        )
    _crowd(listed)
    badput = [row for row in summary["buckets"] if row["bucket"] != Bucket.PRODUCTIVE.value and row["share"] > 0]
    rows, hidden = _rows(ledger, wall)
    attempts = summary["attempts"]
    lost = {
        row["attempt"]: sum(row["gpu_s"].values()) - row["gpu_s"].get(Bucket.PRODUCTIVE.value, 0.0) for row in attempts
    }
    shown = sorted(attempts, key=lambda row: -lost[row["attempt"]])[:MOST_ATTEMPTS]
    opened = set(sorted(lost, key=lambda number: -lost[number])[:ATTEMPTS_OPEN])
    worst = max((1.0 - row["shares"].get(Bucket.PRODUCTIVE.value, 0.0) for row in shown), default=0.0)
    return {
        **summary,
        "units": unit_word(summary) + ("" if summary["capacity"] == 1 else "s"),
        "gpu_word": unit_word(summary),
        "causes": largest_causes(summary),
        "incidents": listed,
        "incidents_hidden": len(summary["incidents"]) - len(listed),
        "attempts_hidden": len(attempts) - len(shown),
        "worst_bucket": max(badput, key=lambda row: row["share"]) if badput else None,
        "largest_badput": max((row["share"] for row in badput), default=0.0),
        "lost_gpu_s": summary["gpu_s"] * (1.0 - summary["goodput"]),
        "ticks": _ticks(start, wall),
        "rows": rows,
        "holes": _holes(ledger, start, wall),
        "curve": _curve(summary, start, wall),
        "span_pieces": _span_pieces(ledger, start, wall),
        "rows_hidden": hidden,
        "attempt_row": [
            {
                "left": _percent(row["start"] - start, wall),
                "width": _percent(row["end"] - row["start"], wall),
                "number": row["attempt"],
                "title": f"Attempt {row['attempt']}: {duration(row['wall_s'])}, {row['outcome']}",
            }
            for row in _longest(attempts)
        ],
        "attempt_bars": [
            {**_bar(row, worst), "shown": row["attempt"] in opened}
            for row in sorted(shown, key=lambda row: row["attempt"])
        ],
        "attempt_scale": worst,
        "plot": _plot(ledger, start, wall),
    }


def _crowd(incidents: list[dict[str, Any]]) -> None:
    """Sets each incident's ``crowd``: "" when its number has room on the time line, else the width without room. The
    costliest incidents get room first."""
    for incident in incidents:
        incident["crowd"], incident["left"] = "", min(max(incident["left"], 1.0), 99.0)
    for words, room in (("near", NUMBER_NARROW), ("near close", NUMBER_WIDE)):
        numbered: list[float] = []
        for incident in sorted(incidents, key=lambda one: (-one["cost_gpu_s"], one["time"])):
            if all(abs(incident["left"] - other) >= room for other in numbered):
                numbered.append(incident["left"])
            else:
                incident["crowd"] = words


def _longest(attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    longest = sorted(attempts, key=lambda row: row["start"] - row["end"])[:MOST_ATTEMPTS_DRAWN]
    return sorted(longest, key=lambda row: row["attempt"])


def _uri(path: str) -> str:
    """A ``file:`` link, which works where the page is read on a machine that has the file; "" when ``path`` is not
    absolute."""
    return Path(path).as_uri() if path.startswith("/") else ""


def _holes(ledger: Ledger, start: float, wall: float) -> list[dict[str, Any]]:
    """Stretches that were left out, between the first and the last moment of the account."""
    gaps = [(before[1], after[0]) for before, after in zip(ledger.kept, ledger.kept[1:], strict=False)]
    return [
        {
            "left": _percent(first / 1e6 - start, wall),
            "width": _percent((last - first) / 1e6, wall),
            "title": f"Left out: {duration((last - first) / 1e6)}",
        }
        for first, last in gaps
    ]


def _curve(summary: dict[str, Any], start: float, wall: float) -> dict[str, Any] | None:
    """Rolling goodput, and that of the run so far, over time."""
    points = summary["over_time"]
    if len(points) < 2:
        return None

    def x(time: float) -> float:
        return round((time - start) / wall * CURVE_WIDTH, 2)

    def y(share: float) -> float:
        return round(CURVE_HEIGHT * (1 - share), 2)

    line = [(x(point["time"]), y(point["goodput"])) for point in points]
    so_far = " ".join(f"{x(point['time'])},{y(point['so_far'])}" for point in points)
    first = [(0.0, line[0][1])]
    path = " ".join(f"{a},{b}" for a, b in first + line)
    tips = []
    before = start
    for point in points:
        cause = f"; most lost to {BUCKETS[Bucket(point['worst'])].label.lower()}" if point["worst"] else ""
        tips.append(
            {
                "left": _percent(before - start, wall),
                "width": _percent(point["time"] - before, wall),
                "title": f"Until {iso(point['time'])[11:]}: {figure(point['goodput'])}, of the run so far"
                f" {figure(point['so_far'])}{cause}",
            }
        )
        before = point["time"]
    return {
        "width": CURVE_WIDTH,
        "height": CURVE_HEIGHT,
        "line": path,
        "area": f"0,{CURVE_HEIGHT} {path} {line[-1][0]},{CURVE_HEIGHT}",
        "so_far": so_far,
        "tips": tips,
        "every": duration(wall / COLUMNS * ROLLING),
    }


def _span_pieces(ledger: Ledger, start: float, wall: float) -> list[dict[str, Any]]:
    """The spans of the lowest rank that has any, for the time line."""
    found = spans_of(ledger)
    lowest = min((one.rank for one in found), default=0)
    found = sorted((one for one in found if one.rank == lowest), key=lambda one: one.start - one.end)[:MOST_SPANS]
    return [
        {
            "left": _percent(one.start - start, wall),
            "width": _percent(one.end - max(start, one.start), wall),
            "title": f"{one.name} {duration(one.end - one.start)}, {iso(one.start)[11:]}, rank {one.rank},"
            f" attempt {one.attempt + 1}" + ("" if one.ended else ", did not end"),
        }
        for one in sorted(found, key=lambda one: one.start)
    ]


def _percent(part: float, whole: float) -> float:
    return round(min(100.0, max(0.0, part / whole * 100)), 4)


def _ticks(start: float, wall: float) -> list[dict[str, Any]]:
    """Five to nine round times for the axis."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
    step = next((s for s in steps if wall / s <= 8), 604800 * max(1, round(wall / 604800 / 8)))
    ticks = []
    moment = (int(start) // step + 1) * step
    while moment < start + wall:
        text = iso(moment)
        label = (
            text[5:10] if step >= 86400 else text[5:16] if wall > 86400 else text[11:16] if step >= 60 else text[11:19]
        )
        left = _percent(moment - start, wall)
        edge = "start" if left < 6 else "end" if left > 94 else "middle"
        ticks.append({"left": left, "label": label, "edge": edge})
        moment += step
    return ticks


def _main(interval: LaneInterval) -> Bucket:
    """The bucket an interval is drawn in."""
    if interval.phase == "train":
        return Bucket.PRODUCTIVE
    return _BY_PHASE.get(interval.phase) or max(interval.parts, key=lambda bucket: interval.parts[bucket])


def _rows(ledger: Ledger, wall: float) -> tuple[list[dict[str, Any]], int]:
    """One row per host, with the time line of its lowest rank. When there are many, those that differ
    most from the rest come first."""
    hosts: dict[str, list[LaneAccount]] = {}
    for lane in ledger.lanes:
        hosts.setdefault(lane.host or f"rank {lane.lane}", []).append(lane)
    chosen = list(hosts.items())
    if len(chosen) > MOST_HOSTS:
        totals = {name: lanes[0].totals() for name, lanes in chosen}
        mean = {bucket: sum(t[bucket] for t in totals.values()) / len(totals) for bucket in Bucket}
        odd = sorted(chosen, key=lambda item: -sum(abs(totals[item[0]][b] - mean[b]) for b in Bucket))[: MOST_HOSTS - 1]
        keep = {chosen[0][0], *(name for name, _ in odd)}
        chosen = [item for item in chosen if item[0] in keep]
    rows = []
    labels = _host_labels([name for name, _ in chosen])
    for name, lanes in chosen:
        lanes.sort(key=lambda lane: lane.lane)
        ranks = f"ranks {lanes[0].lane}-{lanes[-1].lane}" if len(lanes) > 1 else f"rank {lanes[0].lane}"
        if ledger.unit == "host":
            ranks = ""
        rows.append({"host": name, "label": labels[name], "ranks": ranks, "pieces": _pieces(lanes[0], ledger, wall)})
    return rows, len(hosts) - len(rows)


def _host_labels(names: Sequence[str]) -> dict[str, str]:
    """Labels by host name. A long beginning that all names share is replaced by an ellipsis, because a label has room
    for some fifteen letters."""
    alike = re.match(r".*[-_.]|", os.path.commonprefix(list(names)))
    begin = len(alike[0]) if alike is not None and len(names) > 1 else 0
    return {name: f"\u2026{name[begin:]}" if begin > LONG_BEGINNING else name for name in names}


def _pieces(lane: LaneAccount, ledger: Ledger, wall: float) -> list[dict[str, Any]]:
    """Coloured pieces of one row. Lost work is drawn at the end of its training interval, because it was done last."""
    cuts: list[tuple[int, int, Bucket, int]] = []
    for interval in lane.intervals:
        main = _main(interval)
        lost = interval.parts.get(Bucket.LOST_WORK, 0) if interval.phase == "train" else 0
        if lost:
            cuts.append((interval.start_us, interval.end_us - lost, main, interval.attempt))
            cuts.append((interval.end_us - lost, interval.end_us, Bucket.LOST_WORK, interval.attempt))
        else:
            cuts.append((interval.start_us, interval.end_us, main, interval.attempt))
    if len(cuts) > MOST_PIECES:
        cuts = _raster(cuts, ledger)
    start = ledger.start
    return [
        {
            "left": _percent(begin / 1e6 - start, wall),
            "width": _percent((end - begin) / 1e6, wall),
            "bucket": bucket.value,
            "title": f"{BUCKETS[bucket].label} {duration((end - begin) / 1e6)}, {iso(begin / 1e6)[11:]}, attempt"
            f" {attempt + 1}",
        }
        for begin, end, bucket, attempt in cuts
        if end > begin
    ]


def _raster(cuts: list[tuple[int, int, Bucket, int]], ledger: Ledger) -> list[tuple[int, int, Bucket, int]]:
    """Reduces the pieces to one per column of the row: the one that fills most of the column."""
    begin, width = cuts[0][0], max(1, ledger.wall_us // MOST_PIECES)
    filled: dict[int, dict[tuple[Bucket, int], int]] = {}
    for start, end, bucket, attempt in cuts:
        for column in range((start - begin) // width, (end - 1 - begin) // width + 1):
            low, high = begin + column * width, begin + (column + 1) * width
            shares = filled.setdefault(column, {})
            shares[bucket, attempt] = shares.get((bucket, attempt), 0) + min(end, high) - max(start, low)
    merged: list[tuple[int, int, Bucket, int]] = []
    for column in sorted(filled):
        bucket, attempt = max(filled[column], key=lambda key: filled[column][key])
        low, high = begin + column * width, min(begin + (column + 1) * width, cuts[-1][1])
        if merged and merged[-1][2] is bucket and merged[-1][1] == low:
            merged[-1] = (merged[-1][0], high, bucket, merged[-1][3])
        else:
            merged.append((low, high, bucket, attempt))
    return merged


def _bar(row: dict[str, Any], worst: float) -> dict[str, Any]:
    """One attempt's badput as a stack; the longest stack fills the width."""
    parts = []
    for bucket in BUCKETS:
        share = row["shares"].get(bucket.value, 0.0)
        if bucket is not Bucket.PRODUCTIVE and share > 0 and worst > 0:
            title = f"{BUCKETS[bucket].label}: {figure(share)}, {duration(row['gpu_s'][bucket.value])}"
            parts.append({"bucket": bucket.value, "width": round(share / worst * 100, 4), "title": title})
    bad = 1.0 - row["shares"].get(Bucket.PRODUCTIVE.value, 0.0) if row["shares"] else 0.0
    return {**row, "parts": parts, "badput": bad}


def _plot(ledger: Ledger, start: float, wall: float) -> dict[str, Any] | None:
    """Step times over time: mean as a line, mean to longest as a band, saves in flight as ticks below."""
    series = step_series(ledger)
    means = sorted(point[2] for one in series for point in one["points"])
    if not means:
        return None
    # The scale ends a little above the usual step time, so that one hang does not flatten the rest; cuts are marked.
    highs = sorted(point[3] for one in series for point in one["points"])
    top = max(means[int(len(means) * 0.98) - 1 if len(means) > 1 else 0], means[len(means) // 2] * 1.5)
    top = _round_up(min(max(highs[int(len(highs) * 0.98) - 1], top), top * 2.5))

    def x(time: float) -> float:
        return round((time - start) / wall * PLOT_WIDTH, 2)

    def y(seconds: float) -> float:
        return round(PLOT_HEIGHT * (1 - min(seconds, top) / top), 2)

    lines, bands, flights, cut = [], [], [], []
    for one in series:
        points = one["points"]
        lines.append(" ".join(f"{x(p[0])},{y(p[2])}" for p in points))
        bands.append(
            " ".join([f"{x(p[0])},{y(p[3])}" for p in points] + [f"{x(p[0])},{y(p[2])}" for p in reversed(points)])
        )
        before = points[0][0]
        for time, step, _, longest, share in points:
            if share > 0:
                flights.append((_percent(before - start, wall), _percent(time - start, wall), share))
            if longest > top:
                title = f"{duration(longest)} at step {step:,}"
                cut.append((longest, {"left": _percent(time - start, wall), "title": title}))
            before = time
    grid = [{"top": round(100 * (1 - k / 4), 2), "label": duration(top * k / 4)} for k in range(5)]
    return {
        "width": PLOT_WIDTH,
        "height": PLOT_HEIGHT,
        "lines": lines,
        "bands": bands,
        "flights": _flights(flights),
        "cut": [one for _, one in sorted(cut, key=lambda pair: -pair[0])[:MOST_CUT]],
        "grid": grid,
        "usual": ledger.usual_step_s,
        "usual_y": y(ledger.usual_step_s) if ledger.usual_step_s else None,
    }


def _flights(stretches: list[tuple[float, float, float]]) -> list[dict[str, float]]:
    """Stretches with saves in flight, for the template.

    Args:
        stretches: begin and end in percent of the width, and the share of steps with a save in flight. More than
            MOST_FLIGHTS of them are merged into equal columns.
    """
    if len(stretches) > MOST_FLIGHTS:
        width, shares = 100 / MOST_FLIGHTS, [0.0] * MOST_FLIGHTS
        for first, last, share in stretches:
            for column in range(int(first / width), min(MOST_FLIGHTS, int(last / width) + 1)):
                overlap = min(last, (column + 1) * width) - max(first, column * width)
                shares[column] += max(0.0, overlap) / width * share
        stretches = [(column * width, (column + 1) * width, share) for column, share in enumerate(shares) if share]
    return [
        {"left": first, "width": round(max(last - first, 0.1), 4), "share": round(min(1.0, max(share, 0.08)), 2)}
        for first, last, share in stretches
    ]


def _round_up(value: float) -> float:
    """The next number of the form 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next((m * power for m in (1, 1.5, 2, 3, 4, 5, 6, 8) if m * power >= value), 10 * power)
