"""An agent is gone between the manifest of a step and its names, or between two names: the next one reports the step
committed when it has its names, also those that an older step has until then, as ``last.ckpt``."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency import faultpoints
from resiliency.agent.config import TierSpec
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Committed, Complete, Durable, Failed, Heard, NameRefused, Notice, Recorded
from resiliency.agent.uploader import Uploader
from resiliency.checkpoint.checkpointer import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.errors import ResiliencyError
from resiliency.storage.names import read_name
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import make_checkpointer, make_state, run_ranks
from tests.agent.sealing import config_for, manifest_of, seal_of, shard_path, step_of, write_shard

SOON = timedelta(seconds=20)


def step_at(path: Path) -> int | None:
    """The step that a name points to."""
    found = read_name(LocalTier(path.parent), path.name)
    return None if found is None else found.id.step


# ---- real processes


@pytest.mark.kill
@pytest.mark.parametrize(
    ("point", "tier"), [("agent.name.write", "local"), ("agent.upload.name", "store"), ("agent.upload.done", "store")]
)
def test_an_agent_is_killed_before_a_name_moves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, tier: str
) -> None:
    faultpoints.arm("")  # this process has none, whatever its variables say
    monkeypatch.setenv("RESILIENCY_FAULTS", f"{point}:kill@2")
    with make_checkpointer(
        LocalTierOptions(directory=str(tmp_path / "local")),
        remotes=[RemoteTierOptions(address=str(tmp_path / "store"), name="store")],
        options=CheckpointerOptions(agent="process", drain_timeout=timedelta(seconds=10)),
    ) as checkpointer:
        for step in (1, 2):
            ticket = checkpointer.save(step, make_state(step), names=["last.ckpt"])
            assert ticket is not None
            ticket.wait(Stage.COMMITTED if tier == "local" else Stage.DURABLE, tier=tier, timeout=SOON)
            assert step_at(tmp_path / tier / "last.ckpt") == step


@pytest.mark.kill
@pytest.mark.parametrize("point", ["agent.upload.name", "agent.upload.done"])
def test_all_ranks_of_a_host_hear_what_the_next_agent_has_finished_while_they_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    faultpoints.arm("")
    monkeypatch.setenv("RESILIENCY_FAULTS", f"{point}:kill@2")

    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(
            LocalTierOptions(directory=str(tmp_path / "local")),
            coordinator,
            remotes=[RemoteTierOptions(address=str(tmp_path / "store"), name="store")],
            options=CheckpointerOptions(agent="process", drain_timeout=timedelta(seconds=10)),
        ) as checkpointer:
            for step in (1, 2):
                ticket = checkpointer.save(step, make_state(step), names=["last.ckpt"])
                assert ticket is not None
                ticket.wait(Stage.DURABLE, tier="store", timeout=SOON)

    run_ranks(3, work, timeout_s=60)
    assert step_at(tmp_path / "store" / "last.ckpt") == 2


@pytest.mark.kill
def test_a_name_that_the_next_agent_is_refused_is_said_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faultpoints.arm("")
    with make_checkpointer(LocalTierOptions(directory=str(tmp_path / "local")), run="other") as other:
        ticket = other.save(1, make_state(1), names=["taken.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.COMMITTED, timeout=SOON)
    monkeypatch.setenv("RESILIENCY_FAULTS", "agent.name.write:kill@1")
    with make_checkpointer(
        LocalTierOptions(directory=str(tmp_path / "local")),
        options=CheckpointerOptions(agent="process", drain_timeout=timedelta(seconds=10)),
    ) as checkpointer:
        monkeypatch.delenv("RESILIENCY_FAULTS")  # only the first agent is killed
        ticket = checkpointer.save(2, make_state(2), names=["taken.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.DURABLE, timeout=SOON)
    assert any("is gone; starting another" in entry.getMessage() for entry in caplog.records)
    assert any("was not given the name 'taken.ckpt'" in entry.getMessage() for entry in caplog.records)


@pytest.mark.kill
def test_an_agent_is_killed_while_a_store_is_slower_than_the_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was being sent has its manifest there, and gets its name; the one after it is sent."""
    faultpoints.arm("")
    monkeypatch.setenv("RESILIENCY_FAULTS", "agent.upload.name:delay=60")
    with make_checkpointer(
        LocalTierOptions(directory=str(tmp_path / "local")),
        remotes=[RemoteTierOptions(address=str(tmp_path / "store"), name="store", keep=None)],
        options=CheckpointerOptions(agent="process", drain_timeout=timedelta(seconds=10)),
    ) as checkpointer:
        monkeypatch.delenv("RESILIENCY_FAULTS")
        tickets = []
        for step in (1, 2, 3):
            tickets.append(checkpointer.save(step, make_state(step), names=[f"{step}.ckpt"]))
            assert tickets[-1] is not None
            tickets[-1].wait(Stage.DURABLE, tier="local", timeout=SOON)
        assert list((tmp_path / "store").rglob("manifest.json")) and not (tmp_path / "store" / "1.ckpt").exists()
        the_agent().kill()
        for ticket in (tickets[0], tickets[2]):
            ticket.wait(Stage.DURABLE, tier="store", timeout=SOON)
        with pytest.raises(ResiliencyError, match="only the newest step waits for it"):
            tickets[1].wait(Stage.DURABLE, tier="store", timeout=SOON)
    assert [step_at(tmp_path / "store" / f"{step}.ckpt") for step in (1, 2, 3)] == [1, None, 3]


def the_agent() -> psutil.Process:
    (agent,) = [child for child in psutil.Process().children(True) if "resiliency.agent" in child.cmdline()]
    return agent


@pytest.mark.kill
def test_names_that_were_deleted_or_taken_since_are_left_alone_by_the_next_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both tiers: the step was reported with its names, so there is nothing to finish."""
    faultpoints.arm("")
    places = [tmp_path / "local", tmp_path / "store"]
    with make_checkpointer(
        LocalTierOptions(directory=str(places[0])),
        remotes=[RemoteTierOptions(address=str(places[1]), name="store")],
        options=CheckpointerOptions(agent="process", drain_timeout=timedelta(seconds=10)),
    ) as checkpointer:
        for step, names in ((1, ["last.ckpt", "1.ckpt", "mine.ckpt"]), (2, ["last.ckpt"])):
            ticket = checkpointer.save(step, make_state(step), names=names)
            assert ticket is not None
            ticket.wait(Stage.DURABLE, tier="store", timeout=SOON)
            if step == 1:
                for place in places:
                    (place / "1.ckpt").unlink()
                    (place / "mine.ckpt").unlink()
                    (place / "mine.ckpt").write_bytes(b"the user's own file")
                agent = the_agent()
                agent.kill()
                agent.wait(10)
        for place in places:
            assert not (place / "1.ckpt").exists()
            assert (place / "mine.ckpt").read_bytes() == b"the user's own file"
            assert step_at(place / "last.ckpt") == 2


@contextmanager
def first_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: str, *, store: Path | None = None
) -> Iterator[Checkpointer]:
    """A checkpointer with an agent process that has these faults; the agents that follow have none."""
    faultpoints.arm("")
    monkeypatch.setenv("RESILIENCY_FAULTS", faults)
    with make_checkpointer(
        tmp_path / "local",
        remotes=[] if store is None else [RemoteTierOptions(address=str(store), name="store")],
        options=CheckpointerOptions(agent="process", drain_timeout=timedelta(seconds=10)),
    ) as checkpointer:
        monkeypatch.delenv("RESILIENCY_FAULTS")
        yield checkpointer


@pytest.mark.kill
def test_a_save_that_failed_at_its_names_stays_failed_at_the_next_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with first_agent(tmp_path, monkeypatch, "agent.name.write:error@1") as checkpointer:
        tickets = []
        for step in (1, 2, 3):
            ticket = checkpointer.save(step, make_state(step), names=[f"{step}.ckpt"])
            assert ticket is not None
            tickets.append(ticket)
            if step == 1:
                with pytest.raises(ResiliencyError, match="cannot commit"):
                    ticket.wait(Stage.COMMITTED, timeout=SOON)
            else:
                ticket.wait(Stage.DURABLE, timeout=SOON)
            if step == 2:
                the_agent().kill()
        with pytest.raises(ResiliencyError, match="cannot commit"):
            tickets[0].wait(Stage.COMMITTED, timeout=SOON)
        reached = {(outcome.id.step, outcome.stage) for outcome in checkpointer.poll() if outcome.stage is not None}
        assert (3, Stage.DURABLE) in reached and not [entry for entry in reached if entry[0] == 1]
    assert step_at(tmp_path / "local" / "1.ckpt") is None


@pytest.mark.kill
def test_a_wait_for_an_upload_ends_when_the_step_and_its_agent_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with first_agent(tmp_path, monkeypatch, "agent.upload.shard:delay=60", store=tmp_path / "store") as checkpointer:
        ticket = checkpointer.save(1, make_state(1))
        assert ticket is not None
        ticket.wait(Stage.DURABLE, tier="local", timeout=SOON)
        (folder,) = (path.parent for path in (tmp_path / "local").rglob("manifest.json"))
        shutil.rmtree(folder)
        the_agent().kill()
        with pytest.raises(ResiliencyError, match="its local copy is gone"):
            ticket.wait(Stage.DURABLE, tier="store", timeout=SOON)


@pytest.mark.kill
def test_a_commit_that_could_not_be_synced_is_synced_by_the_next_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with first_agent(tmp_path, monkeypatch, "agent.fsync:error@1") as checkpointer:
        ticket = checkpointer.save(1, make_state(1), names=["1.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.COMMITTED, timeout=SOON)
        with pytest.raises(ResiliencyError, match="fsync of"):
            ticket.wait(Stage.DURABLE, timeout=SOON)
        the_agent().kill()
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        ticket.wait(Stage.DURABLE, tier="local", timeout=SOON)


@pytest.mark.kill
@pytest.mark.parametrize("point", ["agent.name.write", "agent.manifest.write"])
def test_what_was_put_under_a_name_after_a_save_failed_is_left_alone_by_the_next_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """And the step is not reported durable elsewhere."""
    with first_agent(tmp_path, monkeypatch, f"{point}:error@1", store=tmp_path / "store") as checkpointer:
        ticket = checkpointer.save(1, make_state(1), names=["mine.ckpt"])
        assert ticket is not None
        with pytest.raises(ResiliencyError, match="cannot commit"):
            ticket.wait(Stage.COMMITTED, timeout=SOON)
        (tmp_path / "local" / "mine.ckpt").write_bytes(b"the user's own file")
        agent = the_agent()
        agent.kill()
        agent.wait(10)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)  # asks the next agent, when it has started
        assert (tmp_path / "local" / "mine.ckpt").read_bytes() == b"the user's own file"
        assert not (tmp_path / "store" / "mine.ckpt").exists() and not ticket.has_reached(Stage.DURABLE)
        ticket = checkpointer.save(2, make_state(2), names=["2.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.DURABLE, tier="store", timeout=SOON)
    assert (tmp_path / "local" / "mine.ckpt").read_bytes() == b"the user's own file"


def test_a_load_right_after_a_save_hides_no_commit_of_another_agent(tmp_path: Path) -> None:
    """On a ramdisk, where no notice of a later stage follows."""

    def work(rank: int, coordinator: Coordinator) -> None:
        options = LocalTierOptions(directory=str(tmp_path / "local"), durable=False)
        with make_checkpointer(options, coordinator) as checkpointer:
            for step in range(1, 6):
                ticket = checkpointer.save(step, make_state(step), names=["last.ckpt"])
                assert ticket is not None
                checkpointer.load()
                ticket.wait(Stage.COMMITTED, timeout=SOON)

    run_ranks(2, work, timeout_s=90)


# ---- one agent after another


Start = Callable[..., tuple[HostAgent, list[Notice]]]


def settle(agent: HostAgent) -> None:
    assert agent.wait(Stage.DURABLE, timeout_s=20)


def commit(agent: HostAgent, step: int, **values: Any) -> None:
    """A replicated step, whose names are files, when the job has one rank; otherwise a sharded one."""
    replicated = agent.config.world_size == 1
    for rank in agent.config.local_ranks:
        file = write_shard(agent.config, step, rank, replicated=replicated)
        agent.handle(rank, seal_of(agent.config, step, file, replicated=replicated, **values))
        settle(agent)
    assert manifest_of(agent.config, step) is not None


def files_of(name: Path) -> dict[Path, Path]:
    """Each file of a name, and a further link to it, which stays."""
    files = {}
    for path in [name, *name.rglob("*")]:
        if path.is_file():
            files[path] = name.parent.parent / f"{path.stat().st_ino}-{secrets.token_hex(4)}"
            os.link(path, files[path])
    return files


def put_back(files: dict[Path, Path]) -> None:
    """As it was before the names moved on: links to what the step before has."""
    for path, kept in files.items():
        path.unlink(missing_ok=True)
        os.link(kept, path)


@pytest.mark.parametrize("ranks", [1, 2], ids=["a file", "a folder"])
@pytest.mark.parametrize("names", [("last.ckpt",), ("2.ckpt", "last.ckpt"), ("last.ckpt", "2.ckpt")])
def test_the_next_agent_moves_a_name_on_that_the_step_before_has(
    tmp_path: Path, start: Start, names: tuple[str, ...], ranks: int
) -> None:
    config = config_for(tmp_path / "local", world_size=ranks, local_ranks=tuple(range(ranks)))
    first, _ = start(config)
    last = tmp_path / "local" / "last.ckpt"
    commit(first, 1, names=("last.ckpt",))
    before = files_of(last)
    commit(first, 2, names=names)
    put_back(before)
    assert step_at(last) == 1
    agent, heard = start(config)
    agent.announce(0)
    settle(agent)
    assert Committed in [type(message) for message in heard]
    assert step_at(last) == 2
    assert all(step_at(tmp_path / "local" / name) == 2 for name in names)


def test_a_folder_that_has_the_shards_and_not_the_manifest_is_finished(tmp_path: Path, start: Start) -> None:
    config = config_for(tmp_path / "local", world_size=2, local_ranks=(0, 1))
    first, _ = start(config)
    commit(first, 1, names=("last.ckpt",))
    (tmp_path / "local" / "last.ckpt" / "manifest.json").unlink()
    settle(start(config)[0])
    assert step_at(tmp_path / "local" / "last.ckpt") == 1
    assert (tmp_path / "local" / "last.ckpt" / "manifest.json").exists()


def test_an_agent_that_can_give_no_names_any_more_does_not_report_the_step_committed(
    tmp_path: Path, start: Start
) -> None:
    """A later attempt has started since the agent before was killed."""
    config = config_for(tmp_path / "local")
    first, _ = start(config)
    last = tmp_path / "local" / "last.ckpt"
    commit(first, 1, names=("last.ckpt",))
    before = files_of(last)
    commit(first, 2, names=("last.ckpt",))
    put_back(before)
    start(dataclasses.replace(config, attempt=2, token="1a1b1c"))
    agent, heard = start(config)
    agent.announce(0)
    settle(agent)
    said = [message for message in heard if getattr(message, "id", None) == step_of(config, 2)]
    assert [type(message) for message in said] == [Failed] and "attempt 2 of this job has started" in said[0].reason
    assert step_at(last) == 1


@pytest.mark.parametrize("names", [("last.ckpt",), ("2.ckpt", "last.ckpt")])
def test_another_hosts_agent_reports_a_step_with_its_names(
    tmp_path: Path, start: Start, names: tuple[str, ...]
) -> None:
    """In a shared folder the agent that wrote the manifest is gone before the names."""
    host_a = config_for(tmp_path / "local", node="a", world_size=2, local_ranks=(0,))
    host_b = dataclasses.replace(host_a, node="b", local_ranks=(1,))
    last = tmp_path / "local" / "last.ckpt"
    (a, _), (b, heard) = start(host_a), start(host_b)
    before: dict[Path, Path] = {}
    for step, given in ((1, ("last.ckpt",)), (2, names)):
        before = files_of(last)
        for agent in (b, a):
            (rank,) = agent.config.local_ranks
            file = write_shard(agent.config, step, rank, replicated=True)
            agent.handle(rank, seal_of(agent.config, step, file, replicated=True, names=given))
            settle(agent)
    assert manifest_of(host_a, 2) is not None and step_at(last) == 2
    put_back(before)
    assert step_at(last) == 1
    b.handle(1, Complete(id=step_of(host_b, 2)))
    settle(b)
    assert heard.count(Committed(id=step_of(host_b, 2), tier="local")) == 1
    assert all(step_at(tmp_path / "local" / name) == 2 for name in names)


def test_something_else_at_a_name_is_no_failed_save(tmp_path: Path, start: Start) -> None:
    """The name is refused, as it was by the agent before."""
    (tmp_path / "local" / "folder.ckpt").mkdir(parents=True)
    (tmp_path / "local" / "folder.ckpt" / "weights").write_bytes(b"a stock sharded checkpoint")
    os.mkfifo(tmp_path / "local" / "fifo.ckpt")
    config = config_for(tmp_path / "local")
    first, heard = start(config)
    commit(first, 1, names=("folder.ckpt", "fifo.ckpt", "last.ckpt"))
    for agent, said in ((first, heard), start(config)):
        agent.announce(0)
        settle(agent)
        assert {message.name for message in said if isinstance(message, NameRefused)} == {"folder.ckpt", "fifo.ckpt"}
        assert Committed(id=step_of(config, 1), tier="local") in said
        assert not [message for message in said if isinstance(message, Failed)]
    assert step_at(tmp_path / "local" / "last.ckpt") == 1


def test_of_the_steps_that_waited_for_a_store_each_is_heard_of(tmp_path: Path, start: Start) -> None:
    """The agent before had sent two, and the files of a third, and was killed before it could send or give up the
    others."""
    store = TierSpec(address=str(tmp_path / "store"), name="store", keep=None)
    config = config_for(tmp_path / "local")
    with_store = dataclasses.replace(config, remotes=(store,))
    for before, steps in ((with_store, (1, 2)), (config, (3, 4, 5))):
        agent, _ = start(before)
        for step in steps:
            commit(agent, step, names=(f"{step}.ckpt",), tiers=("store",))
    sent, kept = (shard_path(dataclasses.replace(config, local=to), 4).parent for to in (store, config.local))
    shutil.copytree(kept, sent, ignore=shutil.ignore_patterns("manifest.json"))  # all of it but the manifest
    agent, heard = start(with_store)
    settle(agent)
    said = {
        step: [
            "gave way" if isinstance(message, Failed) and message.gave_way else type(message).__name__
            for message in heard
            if getattr(message, "tier", "") == "store" and getattr(message, "id", None) == step_of(config, step)
        ]
        for step in range(1, 6)
    }
    assert said == {1: [], 2: ["Durable"], 3: ["gave way"], 4: ["gave way"], 5: ["Durable"]}
    # Not after a look for the commit of another agent: there is none.
    assert all(
        "only the newest step waits for it" in message.reason for message in heard if isinstance(message, Failed)
    )
    assert [step_at(tmp_path / "store" / f"{step}.ckpt") for step in range(1, 6)] == [1, 2, None, None, 5]
    commit(agent, 6, names=("6.ckpt",), supersedes=tuple(f"{step}.ckpt" for step in range(1, 6)))
    settle(agent)
    assert [step for step in range(1, 7) if shard_path(config, step).exists()] == [6], "kept for an upload that is over"


def test_what_was_deleted_on_a_store_does_not_come_back_with_the_next_attempt(tmp_path: Path, start: Start) -> None:
    config = config_for(tmp_path / "local", remotes=(TierSpec(address=str(tmp_path / "store"), name="store", keep=3),))
    first, _ = start(config)
    commit(first, 1, names=("1.ckpt",), tiers=("store",))
    commit(first, 2, names=("2.ckpt",), tiers=())
    assert step_at(tmp_path / "store" / "1.ckpt") == 1
    shutil.rmtree(tmp_path / "store")
    agent, _ = start(dataclasses.replace(config, attempt=2, token="1a1b1c"))
    settle(agent)
    assert not (tmp_path / "store" / "1.ckpt").exists()


def test_a_step_that_was_reported_failed_is_not_reported_committed_with_the_next(tmp_path: Path, start: Start) -> None:
    """Its manifest is there, and its names are not."""
    config = config_for(tmp_path / "local")
    agent, heard = start(config)
    faultpoints.arm("agent.name.write:error")
    try:
        commit(agent, 1, names=("1.ckpt",))
    finally:
        faultpoints.arm("")
    commit(agent, 2, names=("2.ckpt",))
    assert Committed(id=step_of(config, 2), tier="local") in heard
    said = [type(message) for message in heard if getattr(message, "id", None) == step_of(config, 1)]
    assert said == [Recorded, Failed]
    assert step_at(tmp_path / "local" / "1.ckpt") is None


def test_a_copy_of_another_checkpoint_under_a_name_is_not_replaced_by_the_next_agent(
    tmp_path: Path, start: Start
) -> None:
    """But a name that an older step has is, when its file was changed since by another link."""
    config = config_for(tmp_path / "local")
    first, _ = start(config)
    commit(first, 1, names=("1.ckpt", "last.ckpt"))
    commit(first, 2, names=("2.ckpt", "last.ckpt"))
    (shard_path(config, 2).with_name("manifest.json")).unlink()
    for name in ("2.ckpt", "last.ckpt"):
        (tmp_path / "local" / name).unlink()
    shutil.copy2(tmp_path / "local" / "1.ckpt", tmp_path / "local" / "2.ckpt")
    os.link(tmp_path / "local" / "1.ckpt", tmp_path / "local" / "last.ckpt")
    agent, heard = start(dataclasses.replace(config, attempt=2, token="1a1b1c"))
    settle(agent)
    assert [step_at(tmp_path / "local" / f"{name}.ckpt") for name in (1, 2, "last")] == [1, 1, 2]
    assert [message.name for message in heard if isinstance(message, NameRefused)] == ["2.ckpt"]


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("lost", ["manifest and name", "name"])
def test_a_file_that_was_put_under_a_name_since_is_not_replaced_by_the_next_agent(
    tmp_path: Path, start: Start, lost: str, attempt: int
) -> None:
    """By a copy that keeps the time of the last write, too. Nobody was told of the save."""
    config = config_for(tmp_path / "local")
    first, _ = start(config)
    commit(first, 1, names=("mine.ckpt", "1.ckpt"))
    if lost == "manifest and name":
        shard_path(config, 1).with_name("manifest.json").unlink()
    for name in ("mine.ckpt", "1.ckpt"):
        (tmp_path / "local" / name).unlink()
    (tmp_path / "mine").write_bytes(b"the user's own file")
    os.utime(tmp_path / "mine", (0, 0))
    shutil.copy2(tmp_path / "mine", tmp_path / "local" / "mine.ckpt")
    agent, heard = start(config if attempt == 1 else dataclasses.replace(config, attempt=2, token="1a1b1c"))
    settle(agent)
    assert (tmp_path / "local" / "mine.ckpt").read_bytes() == b"the user's own file"
    finishes = attempt == 1 or lost == "manifest and name"
    assert step_at(tmp_path / "local" / "1.ckpt") == (1 if finishes else None)
    refused = [(message.name, message.reason) for message in heard if isinstance(message, NameRefused)]
    assert [name for name, _ in refused] == (["mine.ckpt"] if finishes else [])
    assert all("another file was put at" in reason for _, reason in refused)
    assert manifest_of(config, 1) is not None


def test_a_stock_file_from_before_the_save_is_replaced_by_the_next_agent(tmp_path: Path, start: Start) -> None:
    config = config_for(tmp_path / "local")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "last.ckpt").write_bytes(b"of a stock callback")
    first, _ = start(config)
    before = os.stat(tmp_path / "local" / "last.ckpt").st_ctime
    while time.time() <= before + 0.05:  # a file system's clock is coarser than this one
        threading.Event().wait(0.01)
    faultpoints.arm("agent.manifest.write:error")
    try:
        file = write_shard(config, 1, replicated=True)
        first.handle(0, seal_of(config, 1, file, replicated=True, names=("last.ckpt",)))
        settle(first)
    finally:
        faultpoints.arm("")
    assert step_at(tmp_path / "local" / "last.ckpt") is None
    agent, _ = start(dataclasses.replace(config, attempt=2, token="1a1b1c"))
    settle(agent)
    assert step_at(tmp_path / "local" / "last.ckpt") == 1


@pytest.mark.parametrize("lost", ["manifest and name", "name"])
def test_what_was_reported_failed_is_not_finished_within_the_attempt(tmp_path: Path, start: Start, lost: str) -> None:
    config = config_for(tmp_path / "local", remotes=(TierSpec(address=str(tmp_path / "store"), name="store", keep=3),))
    first, _ = start(dataclasses.replace(config, remotes=()))
    commit(first, 1, names=("1.ckpt",), tiers=("store",))
    if lost == "manifest and name":
        shard_path(config, 1).with_name("manifest.json").unlink()
    (tmp_path / "local" / "1.ckpt").unlink()
    agent, heard = start(config, heard=Heard(failed=(step_of(config, 1),)))
    agent.announce(0)
    settle(agent)
    assert not [message for message in heard if getattr(message, "id", None) == step_of(config, 1)]
    assert not (tmp_path / "local" / "1.ckpt").exists() and not (tmp_path / "store" / "1.ckpt").exists()
    again, _ = start(dataclasses.replace(config, attempt=2, token="1a1b1c"))
    settle(again)
    assert manifest_of(config, 1) is not None


def test_an_upload_is_resumed_although_a_later_step_does_not_go_to_that_tier(tmp_path: Path, start: Start) -> None:
    config = config_for(tmp_path / "local")
    first, _ = start(config)  # as one that was killed before it could send
    commit(first, 1, names=("1.ckpt",), tiers=("store",))
    commit(first, 2, names=("2.ckpt",), tiers=())
    agent, heard = start(
        dataclasses.replace(config, remotes=(TierSpec(address=str(tmp_path / "store"), name="store", keep=3),))
    )
    settle(agent)
    assert step_at(tmp_path / "store" / "1.ckpt") == 1
    assert Durable(id=step_of(config, 1), tier="store") in heard
    assert not (tmp_path / "store" / "2.ckpt").exists()


def test_a_name_that_is_in_its_place_is_not_given_again(tmp_path: Path, start: Start) -> None:
    """A server-side copy of a large file, on a store."""
    config = config_for(tmp_path / "local", remotes=(TierSpec(address=str(tmp_path / "store"), name="store", keep=3),))
    first, _ = start(config)
    commit(first, 1, names=("last.ckpt",), tiers=("store",))
    assert step_at(tmp_path / "store" / "last.ckpt") == 1
    for place in ("local", "store"):
        os.link(shard_path(config, 1), tmp_path / place / "other link")  # keeps the inode from being used again
    before = [os.stat(tmp_path / place / "last.ckpt") for place in ("local", "store")]
    settle(start(config)[0])
    after = [os.stat(tmp_path / place / "last.ckpt") for place in ("local", "store")]
    assert [(found.st_ino, found.st_ctime_ns) for found in after] == [
        (found.st_ino, found.st_ctime_ns) for found in before
    ]


def test_a_step_to_be_sent_is_not_pruned_while_the_agent_starts(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the agent takes between its listing and the uploads."""
    config = config_for(tmp_path / "local")
    first, _ = start(config)  # as one that was killed before it could send
    for step in range(1, 6):
        commit(first, step, names=(), tiers=("store",) if step == 4 else ())
    resume = HostAgent._resume_upload

    def resume_late(agent: HostAgent, uploader: Uploader) -> None:
        assert agent.wait(Stage.DURABLE, tier="local", timeout_s=20)
        resume(agent, uploader)

    monkeypatch.setattr(HostAgent, "_resume_upload", resume_late)
    remotes = (TierSpec(address=str(tmp_path / "store"), name="store", keep=3),)
    local = dataclasses.replace(config.local, keep=1)
    agent, heard = start(dataclasses.replace(config, local=local, remotes=remotes))
    settle(agent)
    assert Durable(id=step_of(config, 4), tier="store") in heard
    assert [step for step in range(1, 6) if shard_path(config, step).exists()] == [5], "the others are pruned"
