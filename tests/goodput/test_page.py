"""The HTML page: what it holds, and how a real browser shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.goodput.ledger import account
from resiliency.goodput.page import MOST_FLIGHTS, MOST_PIECES, _flights, _host_labels, render_page, write_page
from resiliency.goodput.summary import summarize
from resiliency.goodput.taxonomy import BUCKETS, Bucket
from resiliency.telemetry.collect import Collector
from tests.rings import few

from .browser import HOW_TO_INSTALL, NAMES, Browser
from .demo import demo
from .scripted import STEP_S, Job
from .test_start_parts import _job


def page_of(*jobs: Job) -> str:
    runs = []
    for job in jobs:
        collector = Collector()
        for event in job.events:
            collector.add(event)
        ledger = account(collector.runs[job.run])
        runs.append((summarize(ledger), ledger))
    return render_page(runs)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of(demo()), encoding="utf-8")
    return path


def test_the_page_stands_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert "@import" not in text
    assert "http" not in text.lower().replace("http-equiv", "")
    for heading in (
        "Timeline",
        "Badput by attempt",
        "Step time",
        "Incidents and remedies",
        "Checkpoint tiers",
        "Stragglers",
    ):
        assert f"<h2>{heading}</h2>" in text
    for info in BUCKETS.values():
        assert info.label in text
    assert len(text) < 500_000


def test_each_piece_of_the_time_line_names_its_attempt(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "{attempt" not in text
    assert re.search(r"Productive [\d. a-z]+, \d\d:\d\d:\d\d, attempt 1\b", text)


def long_week() -> Job:
    """31 attempts that are much alike."""
    job = Job(ranks=4)
    for attempt in range(31):
        job.start(load=job.step if attempt else None, restore=10.0, startup=60)
        job.steps(40)
        job.fail(detection=2, signal=9)
        job.now += 19_000.0
    return job


def test_incidents_have_seconds_and_a_restart_is_the_next_attempts() -> None:
    collector = Collector()
    for event in long_week().events:
        collector.add(event)
    ledger = account(collector.runs["job"])
    summary = summarize(ledger)
    assert re.search(r">10-09 \d\d:\d\d:\d\d<", render_page([(summary, ledger)]))
    first, second = summary["attempts"][:2]
    assert "restart" not in first["gpu_s"], "it did not restart"
    assert second["gpu_s"]["restart"] == pytest.approx(4 * (19_000 + 60), rel=0.01)


def test_ranks_on_processors_are_not_called_gpus() -> None:
    job = Job(ranks=2)
    job.start()
    job.steps(20)
    job.finish()
    for event in job.events:
        if event.kind == "job_started":
            event.fields["device"] = "cpu"  # type: ignore[index]
    text = page_of(job)
    assert "2 ranks" in text and "GPU" not in text.partition("<h1>")[2]
    assert "Rank time is wall time times ranks; missing" in text


def test_ranks_that_take_turns_in_being_slow_are_no_stragglers() -> None:
    job = Job(ranks=2)
    job.start()
    for step in range(160):
        job.step += 1
        job.advance(STEP_S, Bucket.PRODUCTIVE)
        for rank in range(2):
            busy = 1.2 if step // 8 % 2 == rank else 1.0
            job.emit("step", rank, step=job.step, step_s=STEP_S, busy_s=busy, data_wait_s=0.0, stall_s=0.0)
    job.finish()
    assert summarize(job.ledger())["stragglers"] == []


@pytest.mark.parametrize(("windows", "slower"), [({4}, 1.6), ({4, 5}, 1.15)])
def test_a_rank_that_was_slow_for_a_moment_is_no_straggler(windows: set[int], slower: float) -> None:
    job = Job(ranks=2)
    job.start()
    for step in range(800):
        job.step += 1
        job.advance(STEP_S, Bucket.PRODUCTIVE)
        for rank in range(2):
            busy = slower if rank and step // 8 in windows else 1.0
            job.emit("step", rank, step=job.step, step_s=STEP_S, busy_s=busy, data_wait_s=0.0, stall_s=0.0)
    job.finish()
    assert summarize(job.ledger())["stragglers"] == []


def test_incidents_link_to_the_output_of_the_rank_they_are_about() -> None:
    job = Job(ranks=2)
    job.start()
    for event in job.events:
        if event.kind == "job_started":
            event.fields["logs"] = [f"/var/log/a b/rank-{event.rank}.log", 'C:"><script>']  # type: ignore[index]
    job.steps(20)
    job.fail(detection=1, worker=1, signal=9)
    job.start(load=20)
    job.steps(20)
    job.finish()
    (incident,) = summarize(job.ledger())["incidents"]
    assert incident["logs"] == ["/var/log/a b/rank-1.log", 'C:"><script>']
    text = page_of(job)
    assert 'href="file:///var/log/a%20b/rank-1.log"' in text and "rank-0.log" not in text
    assert "C:&#34;&gt;&lt;script&gt;" in text, "what is no path is text"


def test_hostile_names_stay_text() -> None:
    job = Job(run="<script>alert(1)</script>", ranks=1)
    job.hosts[0] = '"><img src=x onerror=alert(1)>'
    job.start()
    job.steps(20)
    job.finish()
    text = page_of(job)
    assert "<script>alert" not in text
    assert "<img" not in text


def test_a_very_long_run_makes_a_small_page() -> None:
    job = Job(ranks=2)
    for attempt in range(500):
        job.start(load=job.step if attempt else None, restore=1.0, startup=5)
        job.steps(3)
        job.fail(detection=1)
    text = page_of(job)
    assert len(text) < 1_500_000
    rows = text.count('<div class="track">')
    assert rows == 2
    assert text.count("data-tip") < rows * MOST_PIECES + 6000


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_nearly_empty_runs_have_a_page(steps: int) -> None:
    job = Job(ranks=1)
    job.start()
    job.steps(steps)
    assert "Where every second went" in page_of(job)


def test_the_page_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.html"
    path.write_text("before")
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_page(path, [])
    assert [file.name for file in tmp_path.iterdir()] == ["out.html"]
    assert path.read_text() == "before"


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    import shutil

    if not any(map(shutil.which, NAMES)):
        pytest.fail(HOW_TO_INSTALL)
    with Browser() as one:
        yield one


#: Text smaller than 11 pixels or with too little contrast (WCAG AA: 4.5, large text 3), and boxes that stick out.
CHECKS = """(() => {
  const rgb = (text) => { const m = text.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
  const linear = (v) => v / 255 <= 0.03928 ? v / 255 / 12.92 : Math.pow((v / 255 + 0.055) / 1.055, 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c[3] > 0.9) return c;
    }
    return [255, 255, 255, 1];
  };
  const small = [], faint = [], out = [], overlaps = [];
  for (const e of document.querySelectorAll("main *")) {
    const box = e.getBoundingClientRect();
    if (box.width === 0 || box.height === 0) continue;
    const clipped = e.closest(".track, .plot, .stack, .attempts, .meter");
    if (!clipped && (box.right > innerWidth + 0.5 || box.left < -0.5)) out.push(e.tagName + "." + e.className);
    const own = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    if (!own) continue;
    const style = getComputedStyle(e), size = parseFloat(style.fontSize);
    if (size === 0) continue;  // a dot: a number that has no room
    if (size < 11) small.push(own.slice(0, 40) + " " + size);
    const a = light(rgb(style.color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < (size >= 22 ? 3 : 4.5)) faint.push(own.slice(0, 40) + " " + ratio.toFixed(2));
  }
  for (const e of document.querySelectorAll("section")) if (e.scrollWidth > e.clientWidth) out.push(e.innerText.slice(0, 30));
  for (const axis of document.querySelectorAll(".axis")) {
    const boxes = [...axis.children].filter((e) => e.offsetWidth > 0).map((e) => e.getBoundingClientRect());
    for (let i = 1; i < boxes.length; i++) if (boxes[i - 1].right > boxes[i].left) overlaps.push(axis.children[i].textContent);
  }
  return {
    small, faint, out, overlaps,
    scroll: document.documentElement.scrollWidth,
    tracks: document.querySelectorAll(".track").length,
    background: getComputedStyle(document.body).backgroundColor,
  };
})()"""


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", few([1440, 1280, 400], [1280]))
def test_the_page_is_readable(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page, width=width, dark=dark)
    found: dict[str, Any] = browser.evaluate(CHECKS)
    assert browser.errors == []
    assert {address.split(":")[0] for address in browser.requests} <= {"file", "data"}
    assert found["scroll"] <= width, "the page must not scroll sideways"
    assert found["out"] == []
    assert found["small"] == []
    assert found["faint"] == []
    assert found["overlaps"] == []
    assert found["tracks"] == 4
    red = int(re.findall(r"\d+", found["background"])[0])
    assert (red < 40) if dark else (red > 220)


@pytest.mark.browser
@pytest.mark.parametrize("width", [1440, 400])
def test_parts_of_a_restart_and_spans_fit(browser: Browser, tmp_path: Path, width: int) -> None:
    job = _job(told_apart=True)
    for event in job.events:
        if event.kind == "job_started":
            event.fields["logs"] = [f"/var/log/a/very/long/path/of/output/rank-{event.rank:05d}.log"]  # type: ignore[index]
    job.emit("span_ended", 0, span="a check of the data with a rather long name", span_s=12.0)
    path = tmp_path / "parts.html"
    path.write_text(page_of(job), encoding="utf-8")
    browser.open(path, width=width, dark=False)
    found: dict[str, Any] = browser.evaluate(CHECKS)
    assert (found["out"], found["faint"], found["small"]) == ([], [], [])
    assert found["scroll"] <= width
    sides = browser.evaluate(
        "[...document.querySelectorAll('.buckets .n')].map((e) => e.getBoundingClientRect().right)"
    )
    assert max(sides) <= width


@pytest.mark.browser
def test_a_week_fits_on_a_few_screens_and_the_time_line_on_the_first(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "week.html"
    job = long_week()
    for event in job.events:  # all that takes place
        if event.kind == "job_started":
            event.fields.update(since_process_s=30.0, since_callback_s=20.0, imports_s=5.0, opening_s=3.0)  # type: ignore[attr-defined]
            event.fields.update(since_group_s=10.0, group_s=4.0)  # type: ignore[attr-defined]
        if event.kind == "step":
            event.fields.update(data_wait_s=0.1, loop_s=0.1, stall_s=0.1)  # type: ignore[attr-defined]
    path.write_text(page_of(job), encoding="utf-8")
    assert "deviation 0 s" in path.read_text(), "of steps that are equal but for the last bit of a float"
    for width in (400, 1280, 1440):
        browser.open(path, width=width, dark=False)
        assert browser.evaluate("document.documentElement.scrollHeight") < 2500
        folds = browser.evaluate("[...document.querySelectorAll('details.fold')].map((e) => e.open)")
        assert len(folds) == 3 and all(is_open is (width >= 600) for is_open in folds)
        numbers, dots, attempts = browser.evaluate(NUMBERS)
        assert len(numbers) > 8 and (dots > 8) is (width == 400)
        assert all(right <= left + 1 for (_, right), (left, _) in zip(numbers, numbers[1:], strict=False))
        assert (attempts == 0) is (width == 400), "numbers of attempts that are narrower than they"
    assert browser.evaluate("document.querySelector('.chart').getBoundingClientRect().bottom") < 900
    for place, label in browser.evaluate("""[...document.querySelectorAll('.chart .axis span')].map((e) => {
        const a = e.parentElement.getBoundingClientRect(), b = e.getBoundingClientRect();
        const at = a.left + a.width * parseFloat(e.style.left) / 100;
        return [Math.min(...[b.left, (b.left + b.right) / 2, b.right].map((x) => Math.abs(x - at))), e.textContent];
    })"""):
        assert place < 1, f"{label} is {place:.0f} pixels from its time"


#: Sides of the numbers of incidents, how many are dots, and how many attempts have a number.
NUMBERS = """(() => {
  const size = (e) => parseFloat(getComputedStyle(e).fontSize);
  const flags = [...document.querySelectorAll(".flags a")];
  const boxes = flags.filter((e) => size(e) > 0).map((e) => e.getBoundingClientRect());
  const numbered = [...document.querySelectorAll(".attempts:not(.spans) i")].filter((e) => e.textContent && size(e) > 0);
  return [boxes.map((b) => [b.left, b.right]), flags.length - boxes.length, numbered.length];
})()"""


#: Where the third attempt's mark and the axis' labels are, as shares of the visible width.
PLACES = """(() => {
  const box = document.querySelector(".chart .clip").getBoundingClientRect();
  const at = (e) => (e.getBoundingClientRect().left - box.left) / box.width;
  return {
    third: at(document.querySelectorAll(".attempts i")[2]),
    labels: [...document.querySelectorAll(".chart .axis span")].map((e) => e.textContent),
    scroll: document.documentElement.scrollWidth,
  };
})()"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_the_time_line_zooms_to_what_is_dragged_over(browser: Browser, page: Path, width: int) -> None:
    browser.errors.clear()
    browser.open(page, width=width, dark=False)
    whole = browser.evaluate(PLACES)
    box = browser.evaluate(
        "(({ x, y, width }) => [x, y, width])(document.querySelector('.track').getBoundingClientRect())"
    )
    third, y = box[0] + box[2] * whole["third"], box[1] + 5
    half = box[2] * 0.05
    mouse = {"button": "left", "buttons": 1, "clickCount": 1}
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=third - half, y=y, **mouse)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=third + half / 2, y=y, button="left", buttons=1)
    assert browser.evaluate("document.querySelector('.chart').classList.contains('drags')")
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=third + half, y=y, **mouse)
    zoomed = browser.evaluate(PLACES)
    assert abs(zoomed["third"] - 0.5) < 0.05, "what was in the middle is in the middle"
    assert zoomed["labels"] != whole["labels"] and 1 <= len(zoomed["labels"]) <= 9
    assert zoomed["scroll"] <= width
    found = browser.evaluate(CHECKS)
    assert (found["overlaps"], found["faint"]) == ([], [])
    browser.evaluate("document.querySelectorAll('[data-zoom]')[1].click()")
    assert abs(browser.evaluate(PLACES)["third"] - 0.5) < 0.1
    browser.evaluate("document.querySelectorAll('[data-zoom]')[2].click()")
    assert browser.evaluate(PLACES) == whole
    assert browser.errors == []


@pytest.mark.browser
def test_the_theme_switch_and_the_tooltip_work(browser: Browser, page: Path) -> None:
    browser.errors.clear()
    browser.open(page, width=1280, dark=False)
    before = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != before
    x, y = browser.evaluate(
        "(({ x, y }) => [x + 5, y + 5])(document.querySelector('.stack i').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = browser.evaluate(
        "[getComputedStyle(document.getElementById('tip')).display, document.getElementById('tip').textContent]"
    )
    assert tip[0] == "block"
    assert tip[1].startswith("Productive: ")
    assert browser.errors == []


@pytest.mark.browser
def test_the_page_needs_no_script(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, dark=False, scripts=False)
    image = browser.screenshot(width=1280, height=1600)
    browser.open(page, width=1280, dark=False)
    assert abs(len(browser.screenshot(width=1280, height=1600)) - len(image)) < 2000


@pytest.mark.browser
def test_long_names_do_not_widen_the_page(browser: Browser, tmp_path: Path) -> None:
    job = Job(hosts={n: f"host-{n}" + "x" * 180 for n in range(4)})
    job.start()
    job.steps(20)
    job.save(tier="t" * 180)
    job.fail(detection=2, signal="s" * 180)
    job.start(load=20)
    job.emit("checkpoint_failed", 0, step=20, tier="t" * 180, reason="r" * 180)
    job.steps(20)
    job.finish()
    path = tmp_path / "long.html"
    path.write_text(page_of(job), encoding="utf-8")
    for width in (1280, 400):
        browser.open(path, width=width, dark=False)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_saves_in_flight_are_drawn_to_the_end_of_a_long_run() -> None:
    shown = _flights([(place / 12, (place + 1) / 12, 0.5) for place in range(0, 1200, 2)])
    assert len(shown) <= MOST_FLIGHTS
    assert (shown[0]["left"], shown[-1]["left"] + shown[-1]["width"]) == pytest.approx((0.0, 100.0), abs=0.2)
    assert sum(one["share"] * one["width"] for one in shown) == pytest.approx(25.0, rel=0.05)
    few = [(0.0, 10.0, 1.0), (50.0, 50.0, 0.01)]
    assert [(one["left"], one["width"], one["share"]) for one in _flights(few)] == [(0.0, 10.0, 1.0), (50.0, 0.1, 0.08)]


def test_steps_beyond_the_scale_are_marked_the_longest_first() -> None:
    job = Job(ranks=1)
    job.start()
    for number in range(100):
        job.steps(9)
        job.steps(1, extra=20.0 + number, extra_bucket=Bucket.UNKNOWN)
    text = page_of(job)
    assert text.count('class="over"') == 60
    assert "2 m 01 s at step 1,000" in text, "the last one is the longest"


def test_hosts_are_told_apart_by_what_differs() -> None:
    names = [f"gke-pool-with-a-long-name-{number}-ab.internal" for number in range(12)]
    assert _host_labels(names)[names[11]] == "…11-ab.internal"
    assert _host_labels(names[:1]) == {names[0]: names[0]}
    assert _host_labels(["node-0", "node-1"]) == {"node-0": "node-0", "node-1": "node-1"}
    assert _host_labels(["gpu-host", "gpu-host-1"]) == {"gpu-host": "gpu-host", "gpu-host-1": "gpu-host-1"}


def test_attempts_and_incidents_that_have_no_place_are_counted() -> None:
    job = Job(ranks=1)
    for attempt in range(120):
        job.start(load=job.step if attempt else None, startup=5.0)
        job.steps(2)
        job.save()
        job.fail(detection=1.0)
    text = page_of(job)
    assert "117 more attempts" in text and "60 with still less are not shown" in text
    assert "97 cheaper ones" in text and "20 cheaper ones are not shown" in text
