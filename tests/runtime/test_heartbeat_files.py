"""Heartbeats read from outside: of a rank that runs, is killed, stopped, holds the GIL, or is of an earlier attempt."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.rich_utils

from resiliency.cli.main import main
from resiliency.errors import ConfigError
from resiliency.launch.hangs import Seen, hang_text
from resiliency.runtime import heartbeat
from resiliency.runtime.heartbeat_files import HeartbeatFile, RankHeartbeat, read_heartbeats
from resiliency.runtime.heartbeat_page import PAGE_BYTES, Page, PageWriter, Phase, place_word

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, as heartbeats must be."""
    path = Path(f"/dev/shm/heartbeats-of-test-{os.getpid()}-{time.monotonic_ns()}")
    path.mkdir()
    yield path
    for one in path.iterdir():
        one.unlink()
    path.rmdir()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has no heartbeat yet."""
    monkeypatch.setattr(heartbeat, "_own", {})
    monkeypatch.delenv("RESILIENCY_LAUNCHER", raising=False)
    monkeypatch.delenv("RESILIENCY_HEARTBEAT_DIR", raising=False)
    yield
    made = heartbeat._own.get(os.getpid())
    if made is not None:
        for page in made._pages:
            page.close()


def one_of(folder: Path, rank: int = 0) -> RankHeartbeat:
    return next(one for one in read_heartbeats(folder) if one.rank == rank)


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


SCRIPT = """
import ctypes, os, sys, time
from resiliency.runtime.heartbeat import Phase, beat, enter
enter(Phase.SETUP)
for step in range(1, 6):
    beat(step)
{then}
"""
#: Without a release of the GIL: no Python code of the process runs.
HOLDS_THE_GIL = "ctypes.PyDLL(None).sleep(600)"


class Rank:
    """A process that has made five beats, and then does something."""

    def __init__(self, folder: Path, then: str, **variables: Any) -> None:
        more = {key: str(value) for key, value in variables.items()}
        env = os.environ | {"PYTHONPATH": str(ROOT), "RESILIENCY_HEARTBEAT_DIR": str(folder)} | more
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(then=then)], env=env, start_new_session=True
        )

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)


def at_step(folder: Path, step: int, rank: int = 0) -> Callable[[], bool]:
    return lambda: any(one.rank == rank and one.page.step == step for one in read_heartbeats(folder))


def test_a_rank_that_holds_the_gil_is_read_and_is_quiet(folder: Path) -> None:
    with Rank(
        folder, HOLDS_THE_GIL, RANK=3, TORCHELASTIC_RESTART_COUNT=7, RESILIENCY_NODE="h", RESILIENCY_RUN="r"
    ) as rank:
        until(at_step(folder, 5, rank=3))
        first = one_of(folder, 3)
        until(lambda: one_of(folder, 3).quiet_s > first.quiet_s + 0.2)
        seen = one_of(folder, 3)
        assert (seen.pid, seen.host, seen.run, seen.state) == (rank.process.pid, "h", "r", "running")
        assert (seen.page.step, seen.page.phase, seen.page.attempt) == (5, Phase.TRAINING, 7)
        assert seen.page.beats == 5 and seen.page.watched and seen.page.last_s == first.page.last_s
        assert abs(seen.began - time.time()) < 2 * DEADLINE_S


def test_a_stopped_rank_says_so_and_goes_on(folder: Path) -> None:
    with Rank(folder, "while True: beat(step := step + 1); time.sleep(0.001)") as rank:
        until(lambda: bool(read_heartbeats(folder)) and one_of(folder).page.step > 20)
        os.kill(rank.process.pid, signal.SIGSTOP)
        until(lambda: one_of(folder).state == "stopped")
        step = one_of(folder).page.step
        os.kill(rank.process.pid, signal.SIGCONT)
        until(lambda: one_of(folder).page.step > step and one_of(folder).state == "running")


def test_a_killed_rank_leaves_what_it_did_and_the_next_attempt_takes_its_place(folder: Path) -> None:
    with Rank(folder, HOLDS_THE_GIL, RANK=0) as first, Rank(folder, HOLDS_THE_GIL, RANK=1):
        until(lambda: at_step(folder, 5)() and at_step(folder, 5, rank=1)())
        first.process.kill()
        first.process.wait(10)
        dead = one_of(folder, 0)
        assert (dead.state, dead.page.step) == ("ended", 5) and one_of(folder, 1).state == "running"
        with Rank(folder, HOLDS_THE_GIL, RANK=1, TORCHELASTIC_RESTART_COUNT=1):
            until(lambda: one_of(folder, 1).page.attempt == 1)
            assert one_of(folder, 0).state == "earlier attempt", "it is not of the attempt that runs"
        with Rank(folder, HOLDS_THE_GIL, RANK=0, TORCHELASTIC_RESTART_COUNT=1) as next_one:
            until(lambda: one_of(folder, 0).page.attempt == 1)
            assert one_of(folder, 0).pid == next_one.process.pid and one_of(folder, 0).state == "running"


def test_a_process_that_has_the_number_of_a_dead_one_is_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resiliency.runtime.heartbeat_files._process_started", lambda pid: 1)
    file = HeartbeatFile(str(folder))
    assert one_of(folder).state == "ended"
    file.close()


@pytest.mark.parametrize("name", ["boot_id", "_pid_namespace"])
def test_of_a_page_of_another_boot_or_container_nothing_is_guessed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    HeartbeatFile(str(folder)).close()
    assert one_of(folder).state == "running"
    monkeypatch.setattr(f"resiliency.runtime.heartbeat_files.{name}", lambda: "another")
    assert one_of(folder).state == "unknown"
    assert 0 <= one_of(folder).quiet_s < DEADLINE_S


def test_a_reader_never_sees_a_step_with_the_attempt_or_phase_of_another(folder: Path) -> None:
    """The writer alternates between two places as fast as it can; each read must be one of them, each word whole."""
    even = place_word(step=(1 << 40) - 2, phase=Phase.SAVING, attempt=(1 << 16) - 1, watched=True)
    odd = place_word(step=-1, phase=Phase.STARTING, attempt=0, watched=False)
    fd = os.memfd_create("test")
    os.ftruncate(fd, PAGE_BYTES)
    page = mmap.mmap(fd, PAGE_BYTES)
    reader = os.fork()
    if reader == 0:  # another process, as in use: threads of one would take turns
        wrong = 0
        for _ in range(60_000):
            read = Page.read(page)
            whole = (read.step, read.attempt, read.phase, read.watched)
            wrong += whole not in {((1 << 40) - 2, 65535, Phase.SAVING, True), (-1, 0, Phase.STARTING, False)}
            wrong += read.beats not in (0, (1 << 64) - 1)
        os._exit(min(wrong, 99))
    writer = PageWriter(page)
    ended: list[int] = []
    waiting = threading.Thread(target=lambda: ended.append(os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])))
    waiting.start()
    deadline = time.monotonic() + DEADLINE_S
    while not ended and time.monotonic() < deadline:
        for _ in range(1000):
            writer.write(beats=(1 << 64) - 1, last_ns=0, longest_ns=0, place=even)
            writer.write(beats=0, last_ns=0, longest_ns=0, place=odd)
    if not ended:
        os.kill(reader, signal.SIGKILL)
    waiting.join()
    writer.close()
    os.close(fd)
    assert ended == [0]


def test_what_does_not_fit_on_a_page_is_cut_to_what_does() -> None:
    place = place_word(step=1 << 50, phase=Phase.ENDED, attempt=1 << 20, watched=True)
    assert place < 1 << 64
    with mmap.mmap(-1, PAGE_BYTES) as page:
        writer = PageWriter(page)
        writer.write(beats=1, last_ns=2_000_000_000, longest_ns=500_000_000, place=place)
        read = Page.read(page)
        writer._words.release()
    assert (read.step, read.attempt, read.phase) == ((1 << 40) - 2, 65535, Phase.ENDED)
    assert (read.beats, read.last_s, read.longest_s, read.watched) == (1, 2.0, 0.5, True)
    assert Phase(100) is Phase.OTHER, "of a later version"


def test_phases_pauses_and_signs_of_life(folder: Path, own: None) -> None:
    heartbeat.publish(str(folder))
    assert heartbeat.is_published() and not one_of(folder).page.watched
    heartbeat.enter(Phase.LOADING, 40)
    assert (one_of(folder).page.phase, one_of(folder).page.step, one_of(folder).page.watched) == (
        Phase.LOADING,
        40,
        False,
    )
    heartbeat.beat(41)
    heartbeat.enter(Phase.SAVING)
    assert (one_of(folder).page.phase, one_of(folder).page.step, one_of(folder).page.watched) == (
        Phase.SAVING,
        41,
        True,
    )
    heartbeat.enter(Phase.VALIDATION)
    assert not one_of(folder).page.watched, "a validation may take any time"
    beats = one_of(folder).page.beats
    heartbeat.show()
    assert one_of(folder).page.beats == beats + 1 and not one_of(folder).page.watched
    heartbeat.beat()
    assert one_of(folder).page.watched and one_of(folder).page.step == 41
    heartbeat.pause()
    assert not one_of(folder).page.watched and one_of(folder).page.last_s > 0


def test_another_attempt_in_the_same_process_has_a_page_of_its_own(
    folder: Path, own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat.publish(str(folder))
    heartbeat.beat(9)
    began = one_of(folder).began
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    monkeypatch.setenv("RANK", "2")
    heartbeat.start_anew()
    anew = one_of(folder, 2)
    assert (anew.page.attempt, anew.page.step, anew.page.beats) == (4, -1, 0) and anew.began > began
    heartbeat.beat(10)
    assert one_of(folder, 2).page.step == 10 and one_of(folder, 0).page.step == 9


def test_a_folder_on_a_disk_is_refused_and_why_is_said(
    tmp_path: Path, own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resiliency.runtime.heartbeat_files._IN_MEMORY", (1,))
    with pytest.raises(ConfigError, match=r"which is on a disk: a step would wait for it; use a folder in memory"):
        heartbeat.publish(str(tmp_path))
    assert not heartbeat.is_published() and os.listdir(tmp_path) == []


def test_a_variable_that_cannot_work_is_said_once_and_training_goes_on(
    tmp_path: Path, own: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RESILIENCY_HEARTBEAT_DIR", f"{tmp_path}/file")
    for _ in range(3):
        heartbeat.beat(1)
    assert caplog.text.count("this rank has no heartbeat there") == 1


def test_files_that_are_no_heartbeats_are_left_out(folder: Path, tmp_path: Path) -> None:
    HeartbeatFile(str(folder)).close()
    (folder / "rank-00007.heartbeat").write_bytes(b"x" * PAGE_BYTES)
    (folder / "rank-00008.heartbeat").write_bytes(b"")
    (folder / "rank-00009.heartbeat").symlink_to("/dev/zero")
    os.mkfifo(folder / "rank-00010.heartbeat")
    (folder / "notes").touch()
    assert [one.rank for one in read_heartbeats(folder)] == [0]
    with pytest.raises(FileNotFoundError):
        read_heartbeats(tmp_path / "nowhere")


def test_nobody_can_cut_a_page_by_mistake(folder: Path) -> None:
    file = HeartbeatFile(str(folder))
    assert os.stat(file.path).st_mode & 0o777 == 0o444 and os.stat(file.path).st_size == PAGE_BYTES
    assert os.stat(file.path).st_blocks > 0, "its memory is there: a store cannot fail"
    assert os.listdir(folder) == ["rank-00000.heartbeat"]
    file.close()
    file.close()


def test_a_hang_is_said_with_step_and_phase() -> None:
    page = Page(beats=41, last_s=0, longest_s=0.1, watched=True, step=40, phase=Phase.SAVING)
    text = hang_text(0, 7, Seen(page=page, quiet_s=12, stopped_s=0), {})
    assert "It is at step 40 (saving), 41 beats" in text


# -- the command ----------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["heartbeat", *words])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def test_the_command_shows_a_table_and_json(
    folder: Path, own: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = run(capsys, str(folder))
    assert status == 1 and "no heartbeats in" in text
    monkeypatch.setenv("RESILIENCY_NODE", "host-a")
    heartbeat.publish(str(folder))
    heartbeat.beat(12)
    status, text = run(capsys, str(folder))
    assert status == 0
    for word in ("rank", "running", "training", "12", "host-a", str(os.getpid())):
        assert word in text, text
    status, text = run(capsys, str(folder), "--json")
    (row,) = json.loads(text)
    assert status == 0 and (row["step"], row["phase"], row["attempt"], row["state"]) == (12, "training", 0, "running")
    monkeypatch.setenv("RESILIENCY_HEARTBEAT_DIR", str(folder))
    assert run(capsys, "--json")[0] == 0


def test_the_command_refuses_what_is_no_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typer.rich_utils, "MAX_WIDTH", 500)  # else a long path breaks the sentence anywhere
    assert run(capsys)[0] == 2
    status, text = run(capsys, str(tmp_path / "nowhere"))
    assert status == 2 and "No such file" in text


def test_reading_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from resiliency.runtime.heartbeat_files import read_heartbeats;"
        f"read_heartbeats({str(folder)!r}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
