"""A user's policy can be wrong, and does no harm."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.supervisor.model import Incident, Remedy, RemedyKind, Workload, WorkloadSpec
from resiliency.supervisor.policy import Situation, load_policy
from resiliency.supervisor.policy_guard import GuardedPolicy

SITUATION = Situation(
    workload=Workload(spec=WorkloadSpec(name="job", replicas=1)),
    incident=Incident(number=1, workload="job", opened_at_s=0.0, opened_at=0.0),
    observations=(),
    out=(),
    spares=(),
)


class Policy:
    def __init__(self) -> None:
        self.asked = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.leaves = False

    def event_policy(self, situation: Situation) -> Remedy:
        self.asked += 1
        if self.leaves:
            sys.exit("I am done")
        assert self.goes_on.wait(30)
        return Remedy(kind=RemedyKind.WAIT)


@pytest.fixture
def policy() -> Iterator[Policy]:
    made = Policy()
    yield made
    made.goes_on.set()


def test_one_that_does_not_answer_holds_nobody_up_for_long_and_is_not_asked_again_meanwhile(policy: Policy) -> None:
    guarded = GuardedPolicy(policy, answer_s=0.1)
    policy.goes_on.clear()
    began = time.monotonic()
    with pytest.raises(ResiliencyError, match="has not answered within"):
        guarded.event_policy(SITUATION)
    with pytest.raises(ResiliencyError, match="before this one"):
        guarded.event_policy(SITUATION)
    assert time.monotonic() - began < 5 and policy.asked == 1
    policy.goes_on.set()
    (late,) = [thread for thread in threading.enumerate() if thread.name == "supervisor-policy"]
    late.join(10)
    assert guarded.event_policy(SITUATION).kind is RemedyKind.WAIT and policy.asked == 2


def test_one_that_ends_the_process_does_not(policy: Policy) -> None:
    guarded = GuardedPolicy(policy)
    policy.leaves = True
    with pytest.raises(ResiliencyError, match="SystemExit: I am done"):
        guarded.event_policy(SITUATION)
    policy.leaves = False
    assert guarded.event_policy(SITUATION).kind is RemedyKind.WAIT


def test_a_file_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(ConfigError, match="SystemExit"):
        load_policy(f"{tmp_path}/p.py:Mine")
