"""The quickstart: its parts, and a short run of the whole with real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from recipes.quickstart.chaos import Kill, Killer, Shot, Victim, draw_kills
from recipes.quickstart.data import ByteWindows, read_corpus
from recipes.quickstart.figures import figures_of
from recipes.quickstart.follow import Follower, Record
from recipes.quickstart.narrate import story_table
from recipes.quickstart.story import Deed, DeedKind, Teller, chapters_of
from tests.patience import PATIENCE
from tests.processes import descendant_pids

ROOT = Path(__file__).parents[2]


def record(kind: str, time_s: float, *, rank: int = 0, attempt: int = 1, **fields: object) -> Record:
    return {"event_type": kind, "monotonic_s": time_s, "rank": rank, "attempt": attempt, **fields}


def write(folder: Path, *records: Record, tail: str = "", name: str = "rank-0.jsonl") -> None:
    path = folder / ".resiliency" / "run" / "events" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in records) + tail)


def test_kills_are_drawn_from_the_seed_and_hit_everyone() -> None:
    kills = draw_kills(seed=3, count=6, steps=200, ranks=2)
    assert kills == draw_kills(seed=3, count=6, steps=200, ranks=2)
    assert kills != draw_kills(seed=4, count=6, steps=200, ranks=2)
    assert {(kill.victim, kill.in_save) for kill in kills} == {
        (victim, flag) for victim in Victim for flag in (True, False)
    }
    steps = [kill.after_step for kill in kills]
    assert steps == sorted(steps) and 0 < steps[0] and steps[-1] < 200


def test_data_is_the_same_each_time_and_refuses_too_little(tmp_path: Path) -> None:
    text = read_corpus()
    windows = ByteWindows(text, length=16, count=100)
    assert bytes(windows[0].tolist()) == text[:17]
    assert len(windows) == 100 and windows[99].shape == (17,)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(SystemExit, match="holds 5 bytes"):
        read_corpus(str(tmp_path))


def test_follower_knows_the_newest_attempt_and_skips_torn_lines(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.poll() == []
    write(tmp_path, record("job_started", 1.0, pid=10), record("step", 2.0, step=1), tail='{"event_type": "st')
    assert [one["event_type"] for one in follower.poll()] == ["job_started", "step"]
    assert (follower.attempt, follower.step, follower.workers) == (1, 1, {0: 10})
    write(tmp_path, record("job_started", 3.0, attempt=2, pid=11), tail="")  # completes a torn line: that one is lost
    write(
        tmp_path,
        record("job_started", 3.5, attempt=2, pid=12, rank=1),
        record("step", 9.0, step=9),
        name="rank-1.jsonl",
    )
    follower.poll()
    assert (follower.attempt, follower.workers, follower.moved) == (2, {1: 12}, False)


def test_follower_counts_the_steps_of_an_attempt_from_the_step_that_it_began_at(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    write(tmp_path, record("job_started", 1.0, pid=10, host="a"), record("step", 2.0, step=9, count=2))
    follower.poll()
    assert (follower.begun, follower.made, follower.hosts) == (7, 2, {0: "a"})
    write(tmp_path, record("job_started", 3.0, attempt=2, pid=11, host="b"))
    follower.poll()
    assert (follower.moved, follower.made, follower.hosts) == (False, 0, {0: "b"})
    write(tmp_path, record("checkpoint_loaded", 4.0, attempt=2, step=5), record("step", 5.0, attempt=2, step=6))
    follower.poll()
    assert (follower.begun, follower.made, follower.step) == (5, 1, 6)


def test_killer_waits_for_its_moment_and_leaves_a_dying_attempt_alone(tmp_path: Path) -> None:
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
    try:
        follower = Follower(tmp_path)
        kills = [Kill(after_step=2, victim=Victim.RANK, in_save=True, delay_s=0.0, rank=rank) for rank in (0, 1)]
        killer = Killer(kills, follower, ranks=2)

        def feed(*records: Record) -> None:
            write(tmp_path, *records)
            killer.consider(follower.poll())

        feed(*(record("job_started", 1.0, rank=rank, pid=sleepers[rank].pid) for rank in (0, 1)))
        feed(record("step", 2.0, step=1), record("checkpoint_started", 2.5, step=1))
        feed(record("step", 3.0, step=2))
        assert killer.shots == []
        feed(record("checkpoint_started", 3.5, step=2))
        assert sleepers[0].wait(timeout=10) == -9
        feed(record("checkpoint_started", 3.6, rank=1, step=2))  # still the attempt that was hit
        feed(*(record("job_started", 5.0, rank=rank, attempt=2, pid=sleepers[2 + rank].pid) for rank in (0, 1)))
        feed(record("checkpoint_loaded", 5.5, attempt=2, step=2), record("checkpoint_started", 5.6, attempt=2, step=2))
        assert len(killer.shots) == 1  # no step of the new attempt yet
        feed(record("step", 6.0, attempt=2, step=3), record("checkpoint_started", 6.1, attempt=2, step=3))
        assert sleepers[3].wait(timeout=10) == -9
        assert [sleeper.poll() for sleeper in sleepers] == [-9, None, None, -9]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait(timeout=10)
    assert [(shot.step, shot.attempt) for shot in killer.shots] == [(2, 1), (3, 2)]


def test_figures() -> None:
    records = [
        *(record("step", float(step), rank=rank, step=step, step_s=1.0) for step in (1, 2, 3) for rank in (0, 1)),
        *(record("checkpoint_started", 2.1, rank=rank, step=2, stall_s=0.01 * (rank + 1), bytes=50) for rank in (0, 1)),
        record("checkpoint_fenced", 2.2, rank=0, step=2, stall_s=0.02),
        record("checkpoint_saved", 2.5, step=2, tier="local"),
        record("checkpoint_saved", 2.6, step=2, tier="object_store"),
        record("checkpoint_loaded", 8.0, attempt=2, step=2, bytes=100),
        record("step", 9.0, attempt=2, step=3, step_s=1.0),
    ]
    kill = Kill(after_step=1, victim=Victim.RANK, in_save=True, delay_s=0.0, rank=1)
    shots = [
        Shot(kill=kill, time_s=2.3, step=2, attempt=1),
        Shot(kill=kill, time_s=3.5, step=3, attempt=1),
    ]
    figures = figures_of(records, shots)
    assert (figures.saves, figures.save_bytes, figures.restores, figures.restored_bytes) == (1, 100, 1, 100)
    assert figures.stall_s == pytest.approx((0.03,))
    assert figures.stall_share == pytest.approx(0.03 / 4)
    assert figures.in_save == 1
    assert figures.recoveries[1].redone == 1
    assert figures.recoveries[1].duration_s == pytest.approx(5.5)
    with pytest.raises(ValueError, match="did not go on after the kill at step 3"):
        figures_of(records[:6], shots[1:])


def deed(kind: DeedKind, host: str, time_s: float, *, step: int, attempt: int, ranks: int) -> Deed:
    return Deed(kind=kind, host=host, time_s=time_s, step=step, attempt=attempt, ranks=ranks)


#: A host is swapped, another is lost without a spare, and comes back. The supervisor counts attempts in its own way.
DEEDS = [
    deed(DeedKind.KILL, "h-1", 10.0, step=12, attempt=1, ranks=3),
    deed(DeedKind.KILL, "h-0", 20.0, step=30, attempt=2, ranks=3),
    deed(DeedKind.RETURN, "h-0", 40.0, step=50, attempt=3, ranks=2),
]
STORY = [
    record("step", 10.1, step=13),
    record("host_lost", 12.2, rank=-1, attempt=7, lost_host="h-1", reason="not heard of for 2.1 s"),
    record("restart_requested", 12.4, rank=-1, attempt=7, remedy="hot_swap", reason="spares are ready"),
    record("host_swapped", 12.5, rank=-1, attempt=8, old="h-1", new="h-3"),
    *(record("job_started", 13.0, rank=rank, attempt=2, pid=1) for rank in range(3)),
    *(record("checkpoint_loaded", 13.5, rank=rank, attempt=2, step=10) for rank in range(3)),
    *(record("step", 14.0 + rank / 10, rank=rank, attempt=2, step=11) for rank in range(3)),
    record("host_lost", 22.0, rank=-1, attempt=8, lost_host="h-9", reason="another one"),
    record("host_lost", 22.5, rank=-1, attempt=8, lost_host="h-0", reason="not heard of for 2.2 s"),
    record("restart_requested", 22.6, rank=-1, attempt=8, remedy="scale_down", reason="a host is gone, and no spare"),
    record("world_resized", 22.7, rank=-1, attempt=9, old=3, new=2),
    *(record("job_started", 23.0, rank=rank, attempt=3, pid=1) for rank in range(2)),
    record("checkpoint_loaded", 23.5, attempt=3, step=30),
    record("step", 25.0, attempt=3, step=31),
    record("step", 45.0, attempt=3, step=58),
    record("observed", 47.0, rank=-1, attempt=9, observation="capacity"),
    record("restart_requested", 47.2, rank=-1, attempt=9, remedy="scale_up", reason="hosts are back"),
    record("step", 47.5, attempt=3, step=60),
    *(record("job_started", 48.0, rank=rank, attempt=4, pid=1) for rank in range(3)),
    record("checkpoint_loaded", 48.5, attempt=4, step=60),
    record("step", 50.0, attempt=4, step=61),
]


def test_a_story_says_what_came_of_each_deed() -> None:
    swap, down, up = chapters_of(DEEDS, reversed(STORY))
    assert (swap.remedy, swap.done, swap.from_step, swap.redone, swap.ranks) == (
        "hot_swap",
        "hot swap onto h-3",
        10,
        3,
        3,
    )
    assert (swap.noticed_s, swap.decided_s, swap.trains_s) == pytest.approx((2.2, 2.4, 4.0))
    assert (down.remedy, down.host_in, down.redone, down.ranks) == ("scale_down", "", 0, 2)
    assert (down.noticed_s, down.trains_s) == pytest.approx((2.5, 5.0))
    assert (up.remedy, up.meanwhile, up.from_step, up.redone, up.ranks) == ("scale_up", 10, 60, 0, 3)
    assert (up.noticed_s, up.trains_s) == pytest.approx((7.0, 10.0))


def test_a_story_whose_end_was_not_seen_says_so() -> None:
    (chapter,) = chapters_of(DEEDS[:1], STORY[:3])
    assert (chapter.noticed_s, chapter.trains_s, chapter.from_step) == (pytest.approx(2.2), None, None)
    assert "never" in str(list(story_table([chapter], Path("nowhere"), 0.0).columns[1].cells))


def test_each_thing_is_told_once_and_when_it_happens() -> None:
    teller = Teller()
    assert teller.tell([record("step", 1.0, step=1), record("step", 1.1, rank=1, step=1)]) == [(1.0, "training begins")]
    teller.begin(DEEDS[0])
    told = dict(teller.tell(STORY[:13]))
    assert told[12.2] == "2.2 s later h-1 is taken for lost: not heard of for 2.1 s"
    assert told[12.5] == "h-3, a verified spare, takes the place of h-1"
    assert told[13.5] == "all ranks load the checkpoint of step 10"
    assert told[14.0] == "step 11 is made, 4.0 s later: training goes on"
    assert len(told) == 5


def demo(folder: Path, words: str) -> str:
    """What it prints. Its runs are in the folder "demo"."""
    command = [sys.executable, "-m", "recipes.quickstart.demo", "--dir", str(folder / "demo"), *words.split()]
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=540 * PATIENCE)
    finally:
        for pid in (*descendant_pids(process.pid), process.pid) if process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def check_weights(folder: Path, output: str, *, kills: int, commits: int) -> None:
    assert "The weights are equal to the last bit." in output
    assert output.count("SIGKILL to") == kills
    hashes = [
        json.loads((folder / "demo" / name / "result.json").read_text())["hash"] for name in ("undisturbed", "killed")
    ]
    assert hashes[0] == hashes[1]
    assert re.search(rf"checkpoints committed\W+{commits}\W+\d", output)
    assert "<html" in (folder / "demo" / "goodput.html").read_text()


@pytest.mark.long
def test_killed_training_ends_with_the_weights_of_the_undisturbed_one(tmp_path: Path) -> None:
    output = demo(tmp_path, f"--only processes --seed 1 --steps 9 --every 3 --kills 1 --deadline {150 * PATIENCE:.0f}")
    check_weights(tmp_path, output, kills=1, commits=3)


@pytest.mark.nightly
@pytest.mark.timeout(560)
def test_the_whole_demo_outlives_hosts(tmp_path: Path) -> None:
    options = "--steps 18 --every 3 --kills 2 --deadline 250 --hosts 2 --between 4 --quarantine 0.5 --dwell 5"
    output = demo(tmp_path, f"--seed 1 {options}")
    check_weights(tmp_path, output, kills=2, commits=6)
    assert "a verified spare, takes the place of" in output and "goodput of hosts" in output
    assert re.search(r"what was done\W+hot swap onto host-\d\W+scaled down\W+scaled up", output)
    resized = [json.loads(line) for line in (tmp_path / "demo" / "hosts" / "resizes.jsonl").read_text().splitlines()]
    assert [(one["old"], one["new"], one["samples"], one["lr_factor"]) for one in resized[-2:]] == [
        (2, 1, 8, 0.5),
        (1, 2, 16, 1.0),
    ]
