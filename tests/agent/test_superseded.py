"""An agent whose attempt is over, also one that was stopped in the middle of its work, changes nothing that a later
attempt sees."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resiliency import faultpoints
from resiliency.agent import commit
from resiliency.agent._fence import Fence
from resiliency.agent.config import TierSpec
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Bye, Committed, Complete, Delete, Durable, Failed, Recorded
from resiliency.agent.protocol import config_to_json, pack
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import AgentError
from resiliency.storage import attempts
from resiliency.storage.attempts import read_attempt, write_attempt
from resiliency.storage.catalog import scan
from resiliency.storage.claims import claim_attempt
from resiliency.storage.manifest import META_DIR
from resiliency.storage.names import read_name
from resiliency.storage.single_files import restore_folders
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import make_checkpointer
from tests.agent.sealing import RUN, config_for, manifest_of, sealed, shard_path, snapshot, step_of

LATER = {"attempt": 2, "token": "ffffff"}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def save(agent: HostAgent, step: int, **values: Any) -> None:
    agent.handle(0, sealed(agent.config, step, **{"names": (f"step={step}.ckpt", "last.ckpt"), **values}))
    assert agent.wait(Stage.DURABLE, timeout_s=20)


def last(folder: Path) -> int | None:
    found = read_name(LocalTier(folder), "last.ckpt")
    return None if found is None else found.id.step


def test_an_agent_ends_the_attempts_before_its_own_and_no_later_one(local: Path, start: Any) -> None:
    start(config_for(local, **LATER))
    assert read_attempt(str(local / META_DIR / RUN)) == 2
    start(config_for(local))  # a trainer of the earlier attempt went on, and started an agent
    assert read_attempt(str(local / META_DIR / RUN)) == 2


def test_of_two_jobs_that_took_the_same_number_the_second_is_refused(local: Path, start: Any) -> None:
    """On two hosts, at the same moment: neither could see the other when it counted."""
    first, _ = start(config_for(local))
    save(first, 1)
    before = snapshot(local)
    with pytest.raises(AgentError, match="another job took attempt 1"):
        start(config_for(local, node="other", token="ffffff"))
    assert snapshot(local) == before
    save(first, 2)
    assert last(local) == 2
    start(config_for(local))[0].close()  # a new agent of the same start


def test_a_number_taken_by_a_start_that_died_at_once_is_left_out(local: Path) -> None:
    local.mkdir()
    assert claim_attempt(str(local / META_DIR / RUN), 1, "0a0b0c")
    assert not claim_attempt(str(local / META_DIR / RUN), 1, "ffffff") and claim_attempt(
        str(local / META_DIR / RUN), 1, "0a0b0c"
    )
    with make_checkpointer(local, run=RUN) as checkpointer:
        assert checkpointer.session.attempt == 2
    assert [path.name for path in (local / ".resiliency" / RUN).glob("attempt-*")] == ["attempt-0002"]


def test_nothing_is_recorded_committed_named_or_deleted_after_a_later_attempt_began(
    local: Path, tmp_path: Path, start: Any
) -> None:
    remote = tmp_path / "remote"
    store = TierSpec(address=str(remote), name="store", keep=1)
    spec = TierSpec(address=str(local), name="local", keep=1)
    old, heard = start(config_for(local, local=spec, remotes=(store,)))
    save(old, 1, tiers=("store",))
    save(old, 2, tiers=("store",))
    late = sealed(old.config, 3, names=("step=3.ckpt", "last.ckpt"), tiers=("store",))
    write_attempt(str(local / META_DIR / RUN), 2)
    before, sent = snapshot(local), snapshot(remote)
    heard.clear()
    old.handle(0, late)
    old.handle(0, Complete(id=late.id))
    old.handle(0, Delete(names=("step=1.ckpt", "step=2.ckpt"), after=step_of(old.config, 2)))
    assert old.wait(Stage.DURABLE, timeout_s=20)
    old.close()
    assert snapshot(local) == before and snapshot(remote) == sent
    assert {type(message) for message in heard} == {Failed}
    assert all("attempt 2" in message.reason for message in heard if isinstance(message, Failed))


def test_an_agent_stopped_while_it_started_does_not_bring_its_attempt_back(
    local: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read that no later attempt was there, and writes its own number over that of one that began meanwhile."""
    old, heard = start(config_for(local))
    save(old, 1)
    new, _ = start(config_for(local, **LATER))
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "read_attempt", lambda *_: 0)
        write_attempt(str(local / META_DIR / RUN), 1)
    late = sealed(old.config, 2)
    before = snapshot(local)
    heard.clear()
    old.handle(0, late)
    assert old.wait(Stage.DURABLE, timeout_s=20)
    assert {type(message) for message in heard} == {Failed}
    assert snapshot(local) == before
    save(new, 2)


def test_an_agent_that_goes_on_when_a_later_job_has_tidied_up_makes_no_folder(
    local: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped on another host before it wrote a manifest. A folder with that alone would hide what the later job left."""
    old, heard = start(config_for(local))
    save(old, 1)
    hit = faultpoints.hit

    def tidied_up(point: str, **further: Any) -> None:
        if point == "agent.manifest.write":
            shutil.rmtree(local / ".resiliency")
        hit(point, **further)

    monkeypatch.setattr(commit, "hit", tidied_up)
    save(old, 2)
    assert Failed in {type(message) for message in heard}
    assert not list(local.glob(".resiliency/*/steps/*"))


def test_an_upload_in_progress_is_given_up_when_a_later_attempt_began(
    local: Path, tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later attempt's agent sends the step; the name on the tier may be the later attempt's by then."""
    from resiliency.agent import uploader

    remote = LocalTier(tmp_path / "remote", name="store")
    real = remote.put_file

    def slow(key: str, path: str, **further: Any) -> None:
        real(key, path, **further)
        write_attempt(str(local / META_DIR / RUN), 2)  # meanwhile

    monkeypatch.setattr(remote, "put_file", slow)
    monkeypatch.setattr(uploader, "open_tier", lambda *_, **__: remote)
    old, heard = start(config_for(local, remotes=(TierSpec(address=remote.root, name="store"),)))
    save(old, 1, tiers=("store",))
    assert [type(message) for message in heard if getattr(message, "tier", "") == "store"] == [Failed]
    assert not (tmp_path / "remote" / "last.ckpt").exists()
    assert not list((tmp_path / "remote").rglob("*.json"))


def test_the_checkpoints_of_a_ramdisk_stay_when_a_later_attempt_uses_them(local: Path, start: Any) -> None:
    old, _ = start(config_for(local, durable=False))
    save(old, 1)
    old.handle(0, Bye())
    new, _ = start(config_for(local, durable=False, **LATER))
    save(new, 1)
    old.close()
    assert manifest_of(new.config, 1) is not None and last(local) == 1


#: A process that commits a sealed step, which makes the deletion of step 1 due, and stops itself at a point of the code.
AGENT = """
import sys
from resiliency.agent.core import HostAgent
from resiliency.agent.protocol import Framer, config_from_json
from resiliency.events import EventWriter
from resiliency.storage.stage import Stage
config = config_from_json(sys.argv[1])
agent = HostAgent(config, lambda *_: None, EventWriter(run=config.run, attempt=1, rank=-1, host="n", sinks=()))
agent.start()
(seal,) = Framer().feed(sys.argv[2].encode())
agent.handle(0, seal)
agent.wait(Stage.DURABLE, timeout_s=20)
agent.close()
"""


@pytest.mark.parametrize(
    "point",
    [
        "agent.record.write",
        "agent.manifest.write",
        "agent.name.write",
        "agent.committed",
        "agent.fsync",
        "agent.durable",
        "agent.prune.manifest",
        "agent.prune.record",
        "agent.prune.shard",
    ],
)
def test_an_agent_stopped_anywhere_and_continued_in_a_later_attempt_changes_nothing(
    local: Path, start: Any, point: str
) -> None:
    spec = TierSpec(address=str(local), name="local", keep=1)
    first = config_for(local, local=spec)
    agent, _ = start(first)
    save(agent, 1, names=("old.ckpt",))
    agent.close()
    said = pack(sealed(first, 2, names=("step=2.ckpt", "last.ckpt"), supersedes=("old.ckpt",))).decode()
    # At its start the agent makes the step it finds durable, while another thread commits; the second time is ours.
    times = "@2" if point in ("agent.fsync", "agent.durable") else ""
    env = {**os.environ, "RESILIENCY_FAULTS": f"{point}:stop{times}"}
    old = subprocess.Popen([sys.executable, "-c", AGENT, config_to_json(first), said], env=env)
    try:
        found = os.waitid(os.P_PID, old.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None and found.si_code == os.CLD_STOPPED, "the point was not passed"
        # A later attempt keeps everything it finds (keep=None), and saves its own step 2 under the same names.
        new, heard = start(config_for(local, local=TierSpec(address=str(local), name="local"), **LATER))
        save(new, 2)
        assert {type(message) for message in heard} == {Recorded, Committed, Durable}
        new.close()  # its own work in the background is done
        before = snapshot(local)
        old.send_signal(signal.SIGCONT)
        assert old.wait(30) == 0
        after = snapshot(local)
        assert after == before, sorted(set(after.items()) ^ set(before.items()))
        assert last(local) == 2 and manifest_of(new.config, 2) is not None
        assert os.path.samefile(local / "last.ckpt" / "__0_0.distcp", shard_path(new.config, 2))
    finally:
        if old.poll() is None:
            old.kill()
            old.wait(10)


@pytest.mark.parametrize(
    ("call", "target"),
    [
        ("replace", "steps/0000000002-.*/shard-00000.json"),
        ("replace", "steps/0000000002-.*/manifest.json"),
        ("replace", "last.ckpt/manifest.json"),
        ("rename", "steps/0000000001-.*/manifest.json"),
        ("rename", "old.ckpt/manifest.json"),
    ],
    ids=["record", "manifest", "name", "deletion of a step", "deletion of a name"],
)
def test_an_agent_stopped_between_its_last_look_and_a_change_does_not_make_it(
    local: Path, start: Any, monkeypatch: pytest.MonkeyPatch, call: str, target: str
) -> None:
    spec = TierSpec(address=str(local), name="local", keep=1)
    old, heard = start(config_for(local, local=spec))
    save(old, 1, names=("old.ckpt",))
    real, pictures = getattr(os, call), []

    def meanwhile(source: str, destination: str) -> None:
        if not pictures and re.search(f"{target}$", destination if call == "replace" else source):
            pictures.append({})
            new, _ = start(config_for(local, local=TierSpec(address=str(local), name="local"), **LATER))
            save(new, 2)
            new.close()
            pictures[0] = snapshot(local)
        real(source, destination)

    monkeypatch.setattr(os, call, meanwhile)
    old.handle(0, sealed(old.config, 2, names=("step=2.ckpt", "last.ckpt"), supersedes=("old.ckpt",)))
    assert old.wait(Stage.DURABLE, timeout_s=20)
    monkeypatch.undo()
    assert pictures and snapshot(local) == pictures[0]
    reasons = [message.reason for message in heard if isinstance(message, Failed)]
    # Not only that a folder is gone, which is how the change found out.
    assert all("attempt 2 of this job has started; attempt 1 is over" in reason for reason in reasons), reasons
    assert len(reasons) == (call == "replace")
    old.close()
    assert snapshot(local) == pictures[0]


def test_no_thread_or_agent_of_an_attempt_gives_a_stopped_one_its_folder_back(local: Path) -> None:
    """All of them look before each change. One may do so after the later attempt has taken the folder away, and before
    one that was stopped goes on."""
    (local / META_DIR / RUN).mkdir(parents=True)
    stopped, other = Fence(config_for(local)), Fence(config_for(local))
    stopped.check()
    about_to = os.path.join(local, stopped.staging)
    write_attempt(str(local / META_DIR / RUN), 2)
    Fence(config_for(local, **LATER)).end_earlier()
    for each in (stopped, other):
        with pytest.raises(AgentError, match="attempt 1 is over"):
            each.check()
    assert not os.path.exists(about_to)
    assert not list((local / META_DIR / RUN).glob("staging-a0001*")), "a folder is left behind"


def test_an_agent_whose_folder_somebody_deletes_goes_on_with_another(local: Path, start: Any) -> None:
    agent, _ = start(config_for(local))
    save(agent, 1)
    (folder,) = (local / META_DIR / RUN).glob("staging-*")
    shutil.rmtree(folder)
    save(agent, 2)
    assert last(local) == 2
    (again,) = (local / META_DIR / RUN).glob("staging-*")
    assert again != folder, "a thread that was about to use the first one would do so now"


@pytest.mark.parametrize("moved", ["steps", "attempt"])
def test_an_agent_that_tidies_up_while_a_later_job_begins_takes_nothing_from_it(
    local: Path, start: Any, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    """The later job had looked for checkpoints before; it found none afterwards, and began at step 0."""
    with make_checkpointer(LocalTierOptions(directory=str(local), only_files=True), run=RUN) as checkpointer:
        ticket = checkpointer.save(7, {"a": 1}, names=["last.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.DURABLE)
        config = checkpointer.session.client.config
    old, _ = start(dataclasses.replace(config, attempt=2, token="eeeeee"))
    assert old.wait(Stage.DURABLE, timeout_s=20)
    old.handle(0, Bye())
    real, heard = os.rename, []

    def meanwhile(source: str, destination: str) -> None:
        if not heard and os.path.basename(source) == moved:
            heard.append(source)
            restore_folders(LocalTier(local), RUN)  # the ranks do so before there is an agent
            if moved == "steps":
                real(source, destination)
            start(dataclasses.replace(config, attempt=3, token="ffffff"))
            if moved == "steps":
                return
        real(source, destination)

    monkeypatch.setattr(os, "rename", meanwhile)
    old.close()
    monkeypatch.undo()
    assert heard and read_attempt(config.run_folder) == 3
    (step,) = scan(LocalTier(local), RUN)
    assert step.id.step == 7 and step.committed
