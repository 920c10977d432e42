"""What was decided is said: an older step taken, nothing restored, a spell of failures, its end, and the sum at the end."""

from __future__ import annotations

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.save_health import SaveHealth
from resiliency.events import Event, JsonlSink
from resiliency.inspection.by_path import load_path, locate
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import Series, flip_bits, make_checkpointer, make_series, step_dirs
from tests.checkpoint.test_failures import disarmed, disk, events, fill, local, saved, warnings  # noqa: F401 (fixtures)


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return make_series(tmp_path_factory.mktemp("series") / "s", steps=(10, 20, 30), remote=False)


@pytest.fixture
def copy(series: Series, tmp_path: Path) -> Series:
    return series.copy_to(tmp_path / "copy")


def folder_of(series: Series, step: int) -> Path:
    (found,) = [path for known, path in step_dirs(series.local_dir).items() if known.step == step]
    return found


DAMAGE: dict[str, Any] = {
    "missing": lambda folder: (folder / "shard-00000.shard").unlink(),
    "cut": lambda folder: os.truncate(folder / "shard-00000.shard", 2000),
    "bits": lambda folder: flip_bits(folder / "shard-00000.shard", [(1500, 1501)]),
    "no json": lambda folder: [path.write_text("{") for path in folder.glob("*.json")],
}


def damage(folder: Path, kind: str) -> None:
    # Names are links to the same file.
    path = folder / "shard-00000.shard"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    DAMAGE[kind](folder)


def passed_over(root: Path) -> list[dict[str, Any]]:
    lines = [line for log in root.rglob("events/*.jsonl") for line in log.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event_type"] == "checkpoint_passed_over"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_an_older_step_that_is_taken_is_said_in_one_line_and_an_event(
    copy: Series, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder_of(copy, 30), kind)
    assert {one.step for one in copy.load() if one is not None} == {20}
    told = [text for text in warnings(caplog) if "is restored instead" in text]
    assert len(told) == 1, warnings(caplog)
    assert folder_of(copy, 30).name in told[0] and "step 30" in told[0].lower() and "step 20" in told[0].lower()
    (event,) = passed_over(copy.local_dir)
    assert (event["step"], event["taken"]) == (30, 20) and folder_of(copy, 30).name in event["reason"]


def test_the_newest_of_several_is_named_and_the_others_are_counted(
    copy: Series, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder_of(copy, 30), "missing")
    damage(folder_of(copy, 20), "bits")
    assert {one.step for one in copy.load() if one is not None} == {10}
    (told,) = [text for text in warnings(caplog) if "is restored instead" in text]
    assert "of newer steps, 1 more damaged or unfinished" in told
    assert [event["step"] for event in passed_over(copy.local_dir)] == [30, 20]


def test_damage_of_an_older_step_is_not_said_when_the_newest_is_loaded(
    copy: Series, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder_of(copy, 20), "missing")
    assert {one.step for one in copy.load() if one is not None} == {30}
    assert warnings(caplog) == [] and passed_over(copy.local_dir) == []


def test_a_folder_loaded_by_path_says_that_it_means_an_older_step(
    copy: Series, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder_of(copy, 30), "missing")
    located = locate(str(copy.local_dir))
    assert located is not None and located.id.step == 20
    load_path(located)
    (told,) = [text for text in warnings(caplog) if "is taken instead" in text]
    assert "shard-00000.shard is missing" in told


UNFINISHED: dict[str, Any] = {
    "no record": lambda folder: [path.unlink() for path in folder.glob("*.json")],
    "one record": lambda folder: [(folder / name).unlink() for name in ("manifest.json", "shard-00001.json")],
}


@pytest.mark.parametrize("which", [None, 20])
@pytest.mark.parametrize("kind", UNFINISHED)
def test_an_unfinished_step_that_is_passed_over_is_said_in_one_line(
    copy: Series, kind: str, which: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a job is killed in a save, also when the newest whole step is asked for by itself."""
    folder = folder_of(copy, 30)
    UNFINISHED[kind](folder)
    step = next((one for one in step_dirs(copy.local_dir) if one.step == which), None)
    assert {one.step for one in copy.load(step=step) if one is not None} == {20}
    (told,) = warnings(caplog)
    missing = "shard-00001.json" if kind == "one record" else "shard-00000.json"
    assert told.startswith("step 30 ") and f"is unfinished: {folder / missing} is missing" in told
    assert "; step 20 (" in told and told.endswith("is restored instead")
    assert passed_over(copy.local_dir) == []  # a save that was cut off is no damage


def test_records_of_all_ranks_without_a_manifest_are_a_committed_step_and_a_short_shard_damages_it(
    copy: Series, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(copy, 30)
    (folder / "manifest.json").unlink()
    assert {one.step for one in copy.load() if one is not None} == {30} and warnings(caplog) == []
    (folder / "manifest.json").unlink(missing_ok=True)
    damage(folder, "cut")
    assert {one.step for one in copy.load() if one is not None} == {20}
    (told,) = [text for text in warnings(caplog) if "is restored instead" in text]
    assert f"is damaged: {folder / 'shard-00000.shard'} has 2,000 bytes instead of" in told
    assert f"`resiliency ckpt verify {copy.local_dir}`" in told


def test_an_upload_that_was_cut_off_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    series = make_series(tmp_path / "s", steps=(10, 20))
    shutil.rmtree(series.local_dir)
    (folder,) = [path for step, path in step_dirs(series.remote_dir).items() if step.step == 20]
    (folder / "manifest.json").unlink()
    assert {one.step for one in series.load() if one is not None} == {10}
    (told,) = [text for text in warnings(caplog) if "is restored instead" in text]
    assert "step 20 " in told and f"is unfinished: {folder / 'manifest.json'} is missing" in told


def test_an_older_step_that_is_asked_for_says_nothing_of_newer_ones(
    copy: Series, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder_of(copy, 30), "missing")
    wanted = next(step for step in step_dirs(copy.local_dir) if step.step == 10)
    assert {one.step for one in copy.load(step=wanted) if one is not None} == {10}
    assert warnings(caplog) == [] and passed_over(copy.local_dir) == []


def test_shards_without_any_record_are_not_nothing(copy: Series, caplog: pytest.LogCaptureFixture) -> None:
    for path in copy.local_dir.rglob("steps/*/*.json"):
        path.unlink()
    assert copy.load() == [None] * copy.world_size
    (told,) = [text for text in warnings(caplog) if "nothing is restored" in text]
    assert "3 steps lack records" in told and str(folder_of(copy, 30) / "shard-00000.json") in told


def test_an_empty_folder_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load() is None
    assert warnings(caplog) == []


# ---- spells


def test_a_disk_that_stays_full_is_said_once_and_again_when_it_has_room_and_summed_up_at_the_end(
    disk: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make_checkpointer(LocalTierOptions(directory=str(disk), keep=1)) as checkpointer:
        assert saved(checkpointer, 1)
        for spell in (10, 20):
            assert checkpointer.flush(
                timeout=timedelta(seconds=30)
            )  # older steps are deleted now, and give no room in the spell
            lost = 0
            for step in range(5):
                filler = fill(disk)  # again, because an older step's file may have gone meanwhile
                lost += not saved(checkpointer, spell + step)
            assert lost >= 4
            said = [text for text in warnings(caplog) if "No space left" in text]
            assert len(said) == 1, warnings(caplog)
            filler.unlink()
            assert saved(checkpointer, spell + 8)
            (again,) = [text for text in warnings(caplog) if "saves work again" in text]
            assert f"with step {spell + 8}; given up meanwhile: steps" in again
            caplog.clear()
    (total,) = [text for text in warnings(caplog) if "were given up" in text]
    assert "of 13 saves were given up" in total and "No space left" in total


def test_a_job_without_a_failure_says_nothing(local: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    with make_checkpointer(local) as checkpointer:
        for step in (1, 2, 3):
            assert saved(checkpointer, step)
    assert warnings(caplog) == []


def test_a_failure_in_the_agent_process_is_said_by_the_trainer(
    local: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent's own log is a file that nobody reads."""
    from resiliency.checkpoint.options import CheckpointerOptions

    monkeypatch.setenv("RESILIENCY_FAULTS", "agent.record.write:full@2")
    with make_checkpointer(local, options=CheckpointerOptions()) as checkpointer:
        results = [saved(checkpointer, step) for step in (1, 2, 3)]
    assert results == [True, False, True]
    told = warnings(caplog)
    assert "step 2 failed" in told[0] and "Errno 28" in told[0]
    assert "work again, with step 3" in told[1]
    assert "1 of 3 saves were given up" in told[2] and len(told) == 3


def test_of_the_ranks_of_a_host_one_says_what_all_hear(caplog: pytest.LogCaptureFixture) -> None:
    first, other = SaveHealth(0, speaks=True), SaveHealth(1, speaks=False)
    for health in (first, other):
        health.begin(["local", "store"])
        health.fail(5, "no manifest", kind="agent", own=False)
        health.fail_remote("store", 5, "it is down", retrying=True, gave_way=False)
        health.reach("local", 6, Stage.COMMITTED)
        health.summarise()
    assert all("rank 0" in text for text in warnings(caplog)) and len(warnings(caplog)) == 4
    caplog.clear()
    other.fail(7, "its own part", kind="agent", own=True)
    other.reach("local", 8, Stage.COMMITTED)
    assert [("rank 1" in text) for text in warnings(caplog)] == [True, True]


def test_a_tier_that_fails_says_so_once_and_when_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    health = SaveHealth(0, speaks=True)
    for spell in (0, 10):
        for step in range(spell, spell + 7):
            health.begin(["local", "store"])
            health.fail_remote("store", step, "503", retrying=step == spell, gave_way=step != spell)
        assert len(warnings(caplog)) == 2, "that it is down, and that steps will not get there"
        health.reach("store", spell + 7, Stage.DURABLE)
        assert "store works again" in warnings(caplog)[2] and "and 1 more" in warnings(caplog)[2]
        caplog.clear()
    health.summarise()
    assert "12 of 14 saves to store were given up" in warnings(caplog)[0]


def test_what_the_attempt_before_has_left_is_counted_among_the_saves_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It said that 2 of 1 saves were given up."""
    remotes = [RemoteTierOptions(address=str(tmp_path / "store"), name="store")]
    (tmp_path / "store").symlink_to("store")  # a loop: whatever is sent there fails
    for step in (1, 2):
        caplog.clear()
        with make_checkpointer(tmp_path / "local", remotes=remotes) as checkpointer:
            assert checkpointer.save(step, {"x": step}) is not None
    assert any("2 of 2 saves to store were given up" in text for text in warnings(caplog)), warnings(caplog)


# ---- the event log


EVENT = Event(kind="x", time=0.0, monotonic_s=0.0, run="r", attempt=1, rank=0, host="h")


def test_dropped_events_are_said_when_they_are_and_when_they_are_not_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, real, full = JsonlSink(tmp_path / "e.jsonl"), os.write, False

    def write(fd: int, data: bytes) -> int:
        if full and fd == sink._fd:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    for spell in range(2):
        full = True
        for _ in range(3):
            sink.emit(EVENT)
        full = False
        sink.emit(EVENT)
        sink.emit(EVENT)
        told = warnings(caplog)
        assert len(told) == 2, told
        assert "an event is not in the log" in told[0] and "No space left" in told[0] and "from now on" not in told[0]
        assert "is written again; 3 events before are not in it" in told[1]
        caplog.clear()
        assert sink.dropped == 3 * (spell + 1)
    full = True
    sink.emit(EVENT)
    sink.emit(EVENT)
    sink.close()
    assert "the last 2 events are not in the log" in warnings(caplog)[1]
    assert len((tmp_path / "e.jsonl").read_text().splitlines()) == 4
