"""The engine's folder of a job on one host lies apart from the checkpoints, and is found again by whoever needs it."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent.abandoned import delete_abandoned
from resiliency.agent.client import AgentClient
from resiliency.checkpoint import session
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.errors import ResiliencyError
from resiliency.events import Event, JsonlSink
from resiliency.inspection import survey
from resiliency.inspection.verify import check_step
from resiliency.storage import meta_folder as module
from resiliency.storage.manifest import META_DIR
from resiliency.storage.meta_folder import (
    folders_apart,
    key_of,
    make_meta_folder,
    meta_folder,
    move_into_directory,
    owner_of,
)
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    QUICK,
    RUN,
    differences,
    make_checkpointer,
    make_lightning_state,
    run_ranks,
    save_steps,
    step_dirs,
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's state belongs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "resiliency"


@pytest.fixture
def ckpts(tmp_path: Path, state: Path) -> Path:
    return tmp_path / "exp" / "ckpts"


def only_files(directory: Path, *, keep: int | None = 3) -> LocalTierOptions:
    return LocalTierOptions(directory=str(directory), only_files=True, keep=keep)


def save(checkpointer: Any, step: int) -> None:
    ticket = checkpointer.save(step, make_lightning_state(step), names=[f"step={step}.ckpt"])
    assert ticket is not None
    ticket.wait(Stage.DURABLE if ticket.can_be_durable else Stage.COMMITTED)


def killed(directory: Path, *steps: int) -> Path:
    """Leaves what a job leaves whose processes are all killed; returns the folder that lies apart."""
    checkpointer = make_checkpointer(only_files(directory))
    for step in steps:
        save(checkpointer, step)
    checkpointer._parts().session.client.send = lambda message: None  # type: ignore[method-assign]  # no Bye
    checkpointer.close()
    return Path(meta_folder(str(directory)))


# -- a job ------------------------------------------------------------------------------------------------------------


def test_the_directory_holds_checkpoints_and_nothing_else_at_any_time(ckpts: Path, state: Path) -> None:
    with make_checkpointer(only_files(ckpts)) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
            assert sorted(os.listdir(ckpts)) == [f"step={number}.ckpt" for number in range(1, step + 1)]
            assert sorted(os.listdir(ckpts.parent)) == ["ckpts"]
        (apart,) = state.iterdir()
        assert apart.name.startswith("ckpts-") and (apart / RUN / "steps").is_dir()
        assert state.stat().st_mode & 0o777 == 0o700, "others may look into the checkpoints"
        links = {os.stat(ckpts / f"step={step}.ckpt").st_ino for step in (1, 2, 3)}
        assert {os.stat(path / "shard-00000.shard").st_ino for path in (apart / RUN / "steps").iterdir()} == links
    assert sorted(os.listdir(ckpts)) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert not state.exists(), "the folder stays"


@pytest.mark.parametrize("agent", ["embedded", "process"])
def test_ranks_of_one_host_agree_on_it(ckpts: Path, state: Path, agent: Any) -> None:
    def work(rank: int, coordinator: Coordinator) -> tuple[str, list[str]]:
        options = dataclasses.replace(QUICK, agent=agent)
        with make_checkpointer(only_files(ckpts), coordinator, options=options) as checkpointer:
            for step in (1, 2):
                ticket = checkpointer.save(step, make_lightning_state(step), names=[f"step={step}.ckpt"])
                assert ticket is not None
                ticket.wait(Stage.COMMITTED)
            return checkpointer.session.client.config.meta, sorted(os.listdir(ckpts))

    answers = run_ranks(3, work)
    assert len({meta for meta, _ in answers}) == 1 and answers[0][0].startswith(f"{state}/ckpts-")
    if agent == "process":
        assert {tuple(listing) for _, listing in answers} == {("step=1.ckpt", "step=2.ckpt")}


def test_ranks_of_several_hosts_have_it_in_the_directory(
    ckpts: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter(("host a", "host b", "host a", "host b"))
    monkeypatch.setattr(session, "place_of", lambda directory: next(places))

    def work(rank: int, coordinator: Coordinator) -> str:
        with make_checkpointer(only_files(ckpts), coordinator) as checkpointer:
            return checkpointer.session.client.config.meta

    assert set(run_ranks(2, work)) == {str(ckpts / META_DIR)}
    assert not state.exists()


@pytest.mark.parametrize("why", ["a log is wanted", "another tier"])
def test_other_jobs_have_it_in_the_directory(ckpts: Path, state: Path, tmp_path: Path, why: str) -> None:
    local = only_files(ckpts) if why == "another tier" else LocalTierOptions(directory=str(ckpts))
    remotes = [RemoteTierOptions(address=str(tmp_path / "far"))] if why == "another tier" else []
    with make_checkpointer(local, remotes=remotes) as checkpointer:
        save(checkpointer, 1)
        assert sorted(os.listdir(ckpts)) == [META_DIR, "step=1.ckpt"]
    assert not state.exists()


def test_a_folder_that_is_in_the_directory_is_used_where_it_is(ckpts: Path, state: Path) -> None:
    save_steps(ckpts, 1)
    with make_checkpointer(only_files(ckpts)) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and restored.step == 1
        assert not state.exists()
    assert sorted(os.listdir(ckpts)) == ["step=1.ckpt"]


# -- after a job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["embedded", "process"])
def test_what_must_stay_after_a_job_is_moved_into_the_directory(ckpts: Path, state: Path, agent: Any) -> None:
    """Where people see it, and where deleting the checkpoints' folder frees its room."""
    options = dataclasses.replace(QUICK, agent=agent)
    with make_checkpointer(only_files(ckpts), options=options) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
        (ckpts / "step=2.ckpt").unlink()
    assert sorted(os.listdir(ckpts)) == [META_DIR, "step=1.ckpt"] and not state.exists()
    assert sorted(os.listdir(ckpts / META_DIR)) == [".gitignore", RUN]
    assert not list((ckpts / META_DIR / RUN).glob("staging-*"))
    with make_checkpointer(only_files(ckpts)) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and differences(restored.state, make_lightning_state(2)) == []


def test_a_later_job_stops_the_move_of_what_would_be_its_folder_up_to_the_last_moment(ckpts: Path, state: Path) -> None:
    apart = killed(ckpts, 1)
    through = apart / RUN / "staging-a0001-abcdef-00000000"
    through.mkdir()
    through.rmdir()  # as the later job's agent does when it starts
    with pytest.raises(FileNotFoundError):
        move_into_directory(str(apart / RUN), str(ckpts), through=str(through))
    assert os.listdir(ckpts) == ["step=1.ckpt"] and (apart / RUN / "steps").is_dir()
    through.mkdir()
    assert move_into_directory(str(apart / RUN), str(ckpts), through=str(through)) == str(ckpts / META_DIR / RUN)
    assert "staging" not in " ".join(os.listdir(ckpts / META_DIR / RUN)) and not state.exists()


def test_of_two_jobs_in_a_directory_one_that_must_stay_does_not_end_the_other(ckpts: Path, state: Path) -> None:
    with make_checkpointer(only_files(ckpts), run="other") as other:
        save(other, 1)
        with make_checkpointer(only_files(ckpts)) as checkpointer:
            checkpointer.save(5, make_lightning_state(5))  # without a name
        assert sorted(os.listdir(ckpts)) == [META_DIR, "step=1.ckpt"]
        save(other, 2)
    assert sorted(os.listdir(ckpts)) == [META_DIR, "step=1.ckpt", "step=2.ckpt"] and not state.exists()
    assert sorted(os.listdir(ckpts / META_DIR)) == [".gitignore", RUN]


def test_nothing_stays_of_a_job_whose_directory_was_deleted(ckpts: Path, state: Path) -> None:
    with make_checkpointer(only_files(ckpts)) as checkpointer:
        save(checkpointer, 1)
        shutil.rmtree(ckpts)
    assert not ckpts.exists() and not state.exists()


# -- after a kill -------------------------------------------------------------------------------------------------------


def test_after_a_kill_the_directory_holds_checkpoints_and_the_next_job_goes_on(ckpts: Path, state: Path) -> None:
    apart = killed(ckpts, 1, 2)
    assert apart.parent == state and sorted(os.listdir(ckpts)) == ["step=1.ckpt", "step=2.ckpt"]
    with make_checkpointer(only_files(ckpts)) as checkpointer:
        assert checkpointer.session.attempt == 2, "the folder of the killed job was not found"
        restored = checkpointer.load()
        assert restored is not None and differences(restored.state, make_lightning_state(2)) == []
    assert sorted(os.listdir(ckpts)) == ["step=1.ckpt", "step=2.ckpt"] and not state.exists()


def test_after_a_kill_a_job_that_wants_it_in_the_directory_moves_it_there(ckpts: Path, state: Path) -> None:
    killed(ckpts, 1, 2)
    with make_checkpointer(ckpts) as checkpointer:
        assert checkpointer.session.attempt == 2
        restored = checkpointer.load()
        assert restored is not None and restored.step == 2
        assert sorted(os.listdir(ckpts / META_DIR)) == [".gitignore", RUN]
    assert not state.exists()
    assert [step.step for step in step_dirs(ckpts)] == [1, 2]


def test_a_rank_that_moves_it_does_not_disturb_one_that_makes_the_steps_again(
    ckpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent was killed after it had removed the steps. Both ranks link them again; one is first, and goes on while
    the other one looks whether the steps are there."""
    shutil.rmtree(killed(ckpts, 1, 2) / RUN / "steps")
    rename, theirs = os.rename, []

    def late(source: Any, target: Any) -> None:
        if str(target).endswith("/steps"):
            monkeypatch.setattr(os, "rename", rename)
            theirs.append(session._make_run_folder(str(ckpts), RUN, 1, ""))
            raise OSError(errno.ENOTEMPTY, "the other rank's steps")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert [session._make_run_folder(str(ckpts), RUN, 0, "")] == theirs == [str(ckpts / META_DIR / RUN)]
    assert [step.step for step in step_dirs(ckpts)] == [1, 2]


def test_a_job_is_over_when_a_later_one_moves_its_folder(ckpts: Path) -> None:
    """As when the later one had found the folder where it was: nothing of the first one is committed any more."""
    first = make_checkpointer(only_files(ckpts))
    save(first, 1)
    make_meta_folder(str(ckpts), apart=False)
    with pytest.raises(ResiliencyError):
        save(first, 2)
    first.close()
    assert sorted(os.listdir(ckpts)) == [META_DIR, "step=1.ckpt"]
    with make_checkpointer(ckpts) as later:
        restored = later.load()
        assert restored is not None and restored.step == 1


@pytest.mark.parametrize("next_one", ["apart", "in the directory"])
def test_after_a_kill_files_of_jobs_that_had_their_folder_elsewhere_count(
    ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_one: str
) -> None:
    """As after a fit on another host, in a container, or in a shell with another ``XDG_STATE_HOME``."""
    apart = killed(ckpts, 1, 2)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        with make_checkpointer(only_files(ckpts)) as checkpointer:
            assert checkpointer.load() is not None
            save(checkpointer, 3)
    assert apart.is_dir() and os.listdir(tmp_path / "elsewhere") == []
    target = survey.find(str(ckpts))
    assert [listing.id.step for listing in survey.listings(target.tier, RUN)] == [1, 2, 3]
    (ckpts / "step=1.ckpt").unlink()
    with make_checkpointer(only_files(ckpts) if next_one == "apart" else ckpts) as checkpointer:
        assert checkpointer.session.attempt == 3
        restored = checkpointer.load()
        assert restored is not None and restored.step == 3
    assert not apart.exists()


@pytest.fixture
def told_apart(tmp_path: Path) -> None:
    """For tests of folders that are made anew under an earlier one's path."""
    if not module._identity(str(tmp_path)):
        pytest.skip("this file system does not tell a folder from an earlier one of its number")


def resumes_from(directory: Path, *, options: LocalTierOptions | None = None) -> int | None:
    with make_checkpointer(options or only_files(directory)) as checkpointer:
        restored = checkpointer.load()
        return None if restored is None else restored.step


def test_an_event_that_is_written_late_does_not_make_the_folder_anew(
    ckpts: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes the log may be late on a busy machine."""
    ended, write, close = threading.Event(), JsonlSink.emit, AgentClient.close

    def late(self: JsonlSink, event: Event) -> None:
        if threading.current_thread().name == "resiliency-events":
            ended.wait(0.5)
        write(self, event)

    def ends(self: AgentClient, **further: Any) -> None:
        close(self, **further)
        ended.set()

    monkeypatch.setattr(JsonlSink, "emit", late)
    monkeypatch.setattr(AgentClient, "close", ends)
    assert resumes_from(ckpts) is None
    assert ended.is_set() and not state.exists()


@pytest.mark.usefixtures("told_apart")
@pytest.mark.parametrize("how", ["deleted", "moved"])
@pytest.mark.parametrize("inside", [False, True], ids=["apart", "a launcher's job"])
def test_a_directory_made_anew_does_not_take_over_the_steps_of_the_one_before(
    ckpts: Path, state: Path, how: str, inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    apart = killed(ckpts, 1, 2)
    if how == "deleted":
        shutil.rmtree(ckpts)
    else:
        ckpts.rename(ckpts.with_name("old"))
    ckpts.mkdir()
    (ckpts / "config.yaml").touch()
    assert meta_folder(str(ckpts)) == str(ckpts / META_DIR)
    options = LocalTierOptions(directory=str(ckpts), keep=3) if inside else None
    assert resumes_from(ckpts, options=options) is None
    assert f"{ckpts} was made anew" in caplog.text
    assert not apart.exists()
    assert resumes_from(ckpts.with_name("other")) is None  # whatever job is next
    assert not state.exists()
    if how == "moved":
        assert resumes_from(ckpts.with_name("old")) == 2


@pytest.mark.parametrize("name", ["ck.left-0a1b2c3d", "ck.left"])
def test_a_directory_may_be_named_like_a_folder_that_is_left_behind(ckpts: Path, name: str) -> None:
    apart = killed(ckpts.with_name(name), 1)
    assert delete_abandoned(make_meta_folder(str(ckpts), apart=True)) == 0 and apart.is_dir()
    assert resumes_from(ckpts.with_name(name)) == 1


@pytest.mark.usefixtures("told_apart")
def test_what_another_process_made_in_place_of_a_folder_left_behind_is_put_back(
    ckpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = killed(ckpts, 1)
    shutil.rmtree(ckpts)
    ckpts.mkdir()
    rename, calls, made = os.rename, [], []

    def meanwhile(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == 1:
            made.append(make_meta_folder(str(ckpts), apart=True))  # another process is first
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", meanwhile)
        module._leave_behind(str(apart))
    assert made == [str(apart)] and apart.is_dir()
    assert module._owner(str(apart))[1] == module._identity(str(ckpts))


@pytest.mark.usefixtures("told_apart")
def test_a_copy_put_back_in_the_place_of_the_directory_keeps_the_steps_that_have_no_file(ckpts: Path) -> None:
    apart = killed(ckpts, 1, 2, 3)
    (ckpts / "step=3.ckpt").unlink()
    backup = shutil.copytree(ckpts, ckpts.with_name("backup"))
    shutil.rmtree(ckpts)
    shutil.copytree(backup, ckpts)
    assert module._owner(str(apart))[1] != module._identity(str(ckpts))
    assert resumes_from(ckpts) == 3


@pytest.mark.usefixtures("told_apart")
def test_steps_that_never_had_a_name_are_not_given_up_for_a_directory_made_anew(ckpts: Path) -> None:
    """It may be a copy of everything on another disk, and there is no file to tell."""
    checkpointer = make_checkpointer(only_files(ckpts))
    ticket = checkpointer.save(1, make_lightning_state(1))
    assert ticket is not None
    ticket.wait(Stage.DURABLE)
    checkpointer._parts().session.client.send = lambda message: None  # type: ignore[method-assign]  # it is killed
    checkpointer.close()
    ckpts.rmdir()
    ckpts.mkdir()
    assert resumes_from(ckpts) == 1


@pytest.mark.usefixtures("told_apart")
def test_a_directory_that_a_running_job_made_anew_is_its_own(ckpts: Path, state: Path) -> None:
    checkpointer = make_checkpointer(only_files(ckpts))
    save(checkpointer, 1)
    shutil.rmtree(ckpts)
    save(checkpointer, 2)
    apart = Path(meta_folder(str(ckpts)))
    assert apart.parent == state
    checkpointer._parts().session.client.send = lambda message: None  # type: ignore[method-assign]  # it is killed
    checkpointer.close()
    assert module._owner(str(apart))[1] != module._identity(str(ckpts))
    make_meta_folder(str(ckpts), apart=True)
    assert module._owner(str(apart))[1] == module._identity(str(ckpts)), "the next job does not say whose it is"
    assert resumes_from(ckpts) == 2


@pytest.mark.usefixtures("told_apart")
def test_what_a_running_job_uses_stays_while_its_directory_was_made_anew_by_somebody(ckpts: Path) -> None:
    with make_checkpointer(only_files(ckpts)) as checkpointer:
        save(checkpointer, 1)
        apart = Path(checkpointer.session.client.config.meta)
        shutil.rmtree(ckpts)
        ckpts.mkdir()
        other = make_meta_folder(str(ckpts.with_name("other")), apart=True)
        assert delete_abandoned(other) == 0
        save(checkpointer, 2)
        assert apart.is_dir()
    assert resumes_from(ckpts) == 2


def test_a_copy_of_the_directory_is_whole_without_it(ckpts: Path, tmp_path: Path) -> None:
    killed(ckpts, 1, 2)
    shutil.copytree(ckpts, tmp_path / "copy")
    with make_checkpointer(only_files(tmp_path / "copy")) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and differences(restored.state, make_lightning_state(2)) == []


def test_a_job_of_another_directory_deletes_what_belongs_to_a_deleted_one(
    ckpts: Path, state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gone, stays = killed(ckpts, 1), killed(tmp_path / "stays", 1)
    shutil.rmtree(ckpts)
    with make_checkpointer(only_files(tmp_path / "other")) as checkpointer:
        save(checkpointer, 1)
        apart = Path(meta_folder(str(tmp_path / "other")))
        delete_abandoned(str(apart))  # as the agent at its start, which may not have come to it
        assert not gone.exists() and apart.exists() and stays.exists()
    assert f"deleted {gone} (" in caplog.text and f"because {ckpts} was deleted or moved" in caplog.text


def test_the_agent_does_so_when_it_starts(ckpts: Path, tmp_path: Path) -> None:
    gone = killed(ckpts, 1)
    shutil.rmtree(ckpts)
    with make_checkpointer(only_files(tmp_path / "other")) as checkpointer:
        save(checkpointer, 1)  # a sync, which waits for what the agent does first on that thread
        assert not gone.exists()


def test_what_a_running_job_uses_is_not_deleted_when_its_directory_is(ckpts: Path, tmp_path: Path) -> None:
    with make_checkpointer(only_files(ckpts)) as running:
        save(running, 1)
        apart = meta_folder(str(ckpts))
        shutil.rmtree(ckpts)
        other = make_meta_folder(str(tmp_path / "other"), apart=True)
        assert delete_abandoned(other) == 0 and os.path.isdir(apart)
    assert delete_abandoned(other) <= 1


@pytest.mark.parametrize("error", [PermissionError, OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "broken")])
def test_nothing_is_deleted_while_it_is_not_known_whether_the_directory_exists(
    ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | type[OSError]
) -> None:
    apart = killed(ckpts, 1)
    other = make_meta_folder(str(tmp_path / "other"), apart=True)
    lstat = os.lstat

    def fails(path: Any, **given: Any) -> os.stat_result:
        if os.fspath(path) == str(ckpts):
            raise error
        return lstat(path, **given)

    with monkeypatch.context() as broken:
        broken.setattr(os, "lstat", fails)
        assert delete_abandoned(other) == 0 and apart.is_dir()


def test_a_folder_without_an_owner_stays(state: Path, tmp_path: Path) -> None:
    own = make_meta_folder(str(tmp_path / "own"), apart=True)
    (state / "somebody").mkdir()
    assert delete_abandoned(own) == 0 and (state / "somebody").is_dir()
    assert set(folders_apart(own)) == {own, str(state / "somebody")}
    assert delete_abandoned(str(tmp_path / META_DIR)) == 0


# -- who looks ------------------------------------------------------------------------------------------------------


def test_a_running_job_is_listed_and_verified_by_its_directory_and_by_paths_that_messages_show(ckpts: Path) -> None:
    with make_checkpointer(only_files(ckpts)) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
        target = survey.find(str(ckpts))
        views = survey.survey(survey.label_tiers([target]), RUN)
        assert [(view.id.step, view.state) for view in views] == [
            (1, survey.StepState.COMMITTED),
            (2, survey.StepState.COMMITTED),
        ]
        assert [check_step(view) for view in views] == [[], []]
        (copy,) = views[1].copies
        shown = copy.tier.location(copy.listing.key(copy.listing.records[0]))
        assert os.path.isfile(shown) and not shown.startswith(str(ckpts)), "a path that is not there is shown"
        assert survey.find(os.path.dirname(shown)).step == views[1].id
        assert survey.find(os.path.dirname(shown)).tier.root == str(ckpts)
        assert survey.find(f"{ckpts}/{META_DIR}/{RUN}").run == RUN


def test_a_path_apart_has_the_key_it_would_have_in_the_directory(ckpts: Path, state: Path) -> None:
    apart = make_meta_folder(str(ckpts), apart=True)
    assert key_of(f"{apart}/run/steps/x") == f"{ckpts}/{META_DIR}/run/steps/x"
    assert key_of(apart) == f"{ckpts}/{META_DIR}"
    for other in (str(ckpts), "/", f"{state}", f"{state}/unknown/run", "relative"):
        assert key_of(other) == other


def test_a_tier_lists_the_same_keys_wherever_they_lie(ckpts: Path, tmp_path: Path) -> None:
    save_steps(tmp_path / "in", 1)
    make_meta_folder(str(ckpts), apart=True)
    inside, apart = LocalTier(tmp_path / "in"), LocalTier(ckpts)
    keys = sorted(info.key for info in inside.list(f"{META_DIR}/{RUN}/steps/"))
    for key in keys:
        apart.put_bytes(key, inside.read(key))
    apart.put_bytes("a.ckpt", b"x")
    assert sorted(info.key for info in apart.list(f"{META_DIR}/")) == sorted([*keys, f"{META_DIR}/directory"])
    assert sorted(info.key for info in apart.list("")) == sorted([*keys, f"{META_DIR}/directory", "a.ckpt"])
    assert [info.key for info in apart.list("a")] == ["a.ckpt"]
    assert os.listdir(ckpts) == ["a.ckpt"]
    apart.delete(keys[0])
    assert keys[0] not in [info.key for info in apart.list("")]


# -- where it lies ------------------------------------------------------------------------------------------------------


def test_without_a_place_for_state_it_lies_in_the_highest_folder_of_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    top, deep = tmp_path / "top", tmp_path / "top" / "a" / "b"
    deep.mkdir(parents=True)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(str(top)) and real(path, mode))
    made = make_meta_folder(str(deep), apart=True)
    assert os.path.dirname(made) == str(top / f"{META_DIR}-{os.geteuid()}") and meta_folder(str(deep)) == made
    assert key_of(f"{made}/run") == f"{deep}/{META_DIR}/run"
    assert os.listdir(deep) == [] and owner_of(made) == str(deep)


@pytest.mark.parametrize("why", ["another user's", "a file", "no link", "in the directory", "not Linux"])
def test_where_apart_is_impossible_it_is_in_the_directory(
    ckpts: Path, state: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(
        module.os, "access", lambda path, mode: str(path).startswith(str(state.parent.parent / "state"))
    )
    state.parent.mkdir()
    if why == "another user's":
        state.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif why == "a file":
        state.touch()
    elif why == "no link":

        def refused(*_: Any, **__: Any) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refused)
    elif why == "in the directory":
        monkeypatch.setenv("XDG_STATE_HOME", str(ckpts / "state"))
    else:
        monkeypatch.setattr(module.sys, "platform", "darwin")
    assert make_meta_folder(str(ckpts), apart=True) == str(ckpts / META_DIR) == meta_folder(str(ckpts))
    assert os.listdir(ckpts) == [META_DIR] and not state.is_dir() or why == "another user's"


@pytest.mark.mounts
def test_it_never_leaves_the_mount(tmp_path: Path, state: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True, timeout=60)
    try:
        deep = disk / "me" / "exp"
        with make_checkpointer(only_files(deep)) as checkpointer:
            save(checkpointer, 1)
            (base,) = disk.glob(f"{META_DIR}-*")
            assert meta_folder(str(deep)).startswith(f"{base}/exp-") and os.listdir(deep) == ["step=1.ckpt"]
        assert sorted(os.listdir(disk)) == ["me"], "the folder stays"
        with make_checkpointer(only_files(disk)) as checkpointer:  # the mount itself: nothing is above it
            save(checkpointer, 1)
            assert sorted(os.listdir(disk)) == [META_DIR, "me", "step=1.ckpt"]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=60)
    assert not state.exists()


@pytest.fixture
def moved_mount(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A volume, mounted at one place; and another place."""
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(first)], check=True, timeout=60)
    try:
        yield first, second
    finally:
        for place in (first, second):
            subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True, timeout=60)


@pytest.mark.mounts
def test_it_is_found_where_the_volume_is_mounted_the_next_time(moved_mount: tuple[Path, Path], state: Path) -> None:
    first, second = moved_mount
    killed(first / "exp", 1)
    subprocess.run(["mount", "--move", str(first), str(second)], check=False, capture_output=True, timeout=60)
    if not os.path.ismount(second):  # a shared mount cannot be moved
        subprocess.run(["mount", "--bind", str(first), str(second)], check=True, timeout=60)
    with make_checkpointer(only_files(second / "exp")) as checkpointer:
        assert checkpointer.session.attempt == 2
        assert os.listdir(second / "exp") == ["step=1.ckpt"]
