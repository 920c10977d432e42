"""The environment is read once, in one place, and wrong values are named."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

import resiliency
from resiliency.errors import ConfigError
from resiliency.settings import Launch, child_environment, environment


def test_defaults() -> None:
    found = environment({})
    assert (found.run, found.rank, found.world_size) == ("default", 0, 1)
    assert found.node == socket.gethostname() and found.restart == 0 and found.faults == ""
    assert found.events_dir is None and found.local_dir is None and not found.file_tracking


def test_values() -> None:
    found = environment(
        {
            "JOB_IDENTIFIER": "old",
            "RESILIENCY_RUN": "new",
            "RANK": "3",
            "WORLD_SIZE": "8",
            "NODE_NAME": "n",
            "TORCHELASTIC_RESTART_COUNT": "4",
            "RESILIENCY_EVENTS_DIR": "/e",
            "RESILIENCY_LOCAL_DIR": "/l",
            "GOODPUT_USE_FILE_TRACKING": "",
            "RESILIENCY_FAULTS": "save.begin:kill",
        }
    )
    assert (found.run, found.rank, found.world_size) == ("new", 3, 8)
    assert (found.node, found.restart, found.events_dir, found.local_dir, found.file_tracking) == (
        "n",
        4,
        "/e",
        "/l",
        True,
    )
    assert environment({"JOB_IDENTIFIER": "old"}).run == "old"
    assert environment({"NODE_NAME": "n", "RESILIENCY_NODE": "m"}).node == "m"
    assert environment({"RANK": "", "RESILIENCY_RUN": "", "RESILIENCY_EVENTS_DIR": ""}) == environment({})


def test_a_start_after_a_host_came_or_went_is_a_restart_though_torch_does_not_count_it() -> None:
    variables = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
    writer = environment(variables).launch.job
    assert not environment(variables | {"RESILIENCY_LAUNCHER_STARTS": "0"}).launch.continues(writer)
    assert environment(variables | {"RESILIENCY_LAUNCHER_STARTS": "1"}).launch.continues(writer)


def test_jobs_and_restarts_of_launchers() -> None:
    """What a restart does with them is in tests/callbacks/test_auto_resume.py."""
    assert environment({}).launch == Launch()
    found = environment({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}).launch
    assert found == Launch(job={"torchrun": "a", "slurm": "7"}, restarts=frozenset({"torchrun"}))
    assert found.continues({"torchrun": "a"})
    assert not found.continues({"slurm": "7"})
    assert not found.continues({})
    assert environment({"JOBSET_NAME": "n", "JOBSET_UID": "u"}).launch.job == {"jobset": "u"}
    assert environment({"RESILIENCY_RUN": "r", "RESILIENCY_ATTEMPT": "1"}).launch.job == {"resiliency": "r"}
    assert environment({"RESILIENCY_RUN": "r"}).launch == Launch(), "a run alone is not a launcher's job"


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_RESTART_COUNT",
        "JOBSET_RESTART_ATTEMPT",
        "RESILIENCY_ATTEMPT",
    ],
)
@pytest.mark.parametrize("value", ["x", "1.5", "0x10", " "])
def test_numbers_that_are_none(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        environment({name: value})


def test_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert environment().rank == 5
    monkeypatch.setenv("RANK", "6")
    assert environment().rank == 6


def test_children_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(resiliency.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", f"/one{os.pathsep}{here}{os.pathsep}/one")
    env = child_environment()
    assert env["PYTHONPATH"].split(os.pathsep) == [here, "/one"]
    assert {key: value for key, value in env.items() if key != "PYTHONPATH"} == {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    }
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == here


def test_nobody_else_reads_the_environment() -> None:
    package = Path(resiliency.__file__).parent
    readers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b", re.sub(r'("""[\s\S]*?"""|``[^`]*``|#.*)', "", path.read_text()))
    ]
    assert [name for name in readers if not name.startswith("testing/")] == ["settings.py"]


@pytest.mark.parametrize(
    ("variables", "local_rank"),
    [
        ({}, None),
        ({"RANK": "5"}, None),
        ({"LOCAL_RANK": "2", "SLURM_LOCALID": "3"}, 2),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"RANK": "5", "LOCAL_WORLD_SIZE": "4"}, 1),
    ],
)
def test_the_rank_on_its_host(variables: dict[str, str], local_rank: int | None) -> None:
    assert environment(variables).local_rank == local_rank
