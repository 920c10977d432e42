"""Steps of plans that work, fail, hang, are answered late, twice and by others, with hosts lost and the supervisor killed
around every transaction: each is carried out once or its fallback is, and every incident ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from resiliency.runtime.messages.monitor import StepEnded, StepKind
from resiliency.runtime.messages.observations import DeviceClass, ObservationKind
from resiliency.supervisor.model import Outcome, Plan, WorkloadSpec, WorkloadState

from .simulated_service import BEHAVIOURS, Whole

NAMES = [f"h-{number}" for number in range(5)]
HOST_STEPS = [StepKind.VERIFY, StepKind.CHECKPOINT, StepKind.RESET_DEVICES, StepKind.SIGNAL]


def spec(**values: object) -> WorkloadSpec:
    given = {
        "name": "job",
        "replicas": 3,
        "dwell_s": 1.0,
        "start_timeout_s": 6.0,
        "stop_timeout_s": 1.0,
        "verify_timeout_s": 3.0,
        "checkpoint_timeout_s": 2.0,
        "reset_timeout_s": 3.0,
        "healthy_s": 20.0,
        "wait_timeout_s": 3600.0,
        **values,
    }
    return WorkloadSpec(**given)  # type: ignore[arg-type]


class Machine(RuleBasedStateMachine):
    """``Whole.check`` looks at what must hold after every half second, and the journal at each transaction."""

    @initialize(
        in_job=st.integers(0, 2),
        restarts=st.integers(0, 2),
        fewest=st.integers(1, 3),
        checks=st.lists(st.sampled_from(BEHAVIOURS), min_size=len(NAMES), max_size=len(NAMES)),
    )
    def start(self, in_job: int, restarts: int, fewest: int, checks: list[str]) -> None:
        given = {"max_in_job_restarts": in_job, "max_workload_restarts": restarts, "min_replicas": fewest}
        self.all = Whole(spec(**given), len(NAMES))
        for host, how in zip(self.all.hosts.values(), checks, strict=True):
            host.behaves[StepKind.VERIFY] = how
        self.all.pass_time(1.0)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.all.pass_time(seconds)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(HOST_STEPS), how=st.sampled_from(BEHAVIOURS))
    def script(self, name: str, kind: StepKind, how: str) -> None:
        self.all.hosts[name].behaves[kind] = how

    @rule(hook=st.sampled_from([*BEHAVIOURS, "throws"]), cluster=st.sampled_from([*BEHAVIOURS, "throws"]))
    def script_own(self, hook: str, cluster: str) -> None:
        self.all.hook_behaves, self.all.cluster_behaves = hook, cluster

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from([DeviceClass.RESET, DeviceClass.SWAP]))
    def device_fault(self, name: str, kind: DeviceClass) -> None:
        self.all.observed(name, ObservationKind.DEVICE_FAULT, device="0", device_class=kind)
        self.all.pass_time(0.5)

    @rule(name=st.sampled_from(NAMES))
    def lose_worker(self, name: str) -> None:
        if self.all.hosts[name].place is not None:
            self.all.observed(name, ObservationKind.WORKER_LOST, rank=0)
            self.all.pass_time(0.5)

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        if self.all.service is not None:
            self.all.service.drain(name, "maintenance")
            self.all.observed(name, ObservationKind.DRAIN)
            self.all.pass_time(0.5)

    @rule(name=st.sampled_from(NAMES))
    def lose_host(self, name: str) -> None:
        self.all.lose_host(name)

    @rule(name=st.sampled_from(NAMES))
    def bring_back(self, name: str) -> None:
        self.all.bring_back(name)

    @rule(ago=st.integers(0, 11), shift=st.sampled_from([(0, 0), (1, 0), (0, -1), (0, 1)]))
    def answer_again(self, ago: int, shift: tuple[int, int]) -> None:
        """An answer of before, as it was, or of another generation or step."""
        if self.all.said:
            name, ended = self.all.said[-1 - ago % len(self.all.said)]
            self.all.hosts[name].say(
                StepEnded(
                    plan=ended.plan,
                    at=ended.at + shift[0],
                    generation=ended.generation + shift[1],
                    problem=ended.problem,
                )
            )
            self.all.pass_time(0.5)

    @rule(name=st.sampled_from(NAMES), shift=st.sampled_from([(1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)]))
    def answer_for_another(self, name: str, shift: tuple[int, int, int]) -> None:
        """What is asked of a host now, but for the plan, the step, or the generation: of a state file that is lost."""
        for plan in [plan for plan in self.all.journal.plans.values() if plan.step is not None]:
            number, at, generation = plan.number + shift[0], plan.at + shift[1], plan.generation + shift[2]
            self.all.hosts[name].say(StepEnded(plan=number, at=at, generation=generation))
        self.all.pass_time(0.5)

    @rule(when=st.sampled_from(["before", "after"]), seconds=st.sampled_from([0.5, 3.0]))
    def kill_at_a_transaction(self, when: str, seconds: float) -> None:
        self.all.journal.dies = when
        self.all.pass_time(seconds)
        self.all.journal.dies = ""

    @rule(away_s=st.sampled_from([0.0, 1.0]))
    def kill(self, away_s: float) -> None:
        self.all.kill()
        if away_s:
            self.all.pass_time(away_s)
        self.all.start()

    def teardown(self) -> None:
        """All is well from now on: every incident ends, and the job trains or was stopped with a reason."""
        if not hasattr(self, "all"):
            return
        try:
            self.all.hook_behaves = self.all.cluster_behaves = "works"
            for host in self.all.hosts.values():
                host.behaves.clear()
                if not host.up:
                    self.all.bring_back(host.name)
                assert self.all.service is not None
                self.all.service.uncordon(host.name)
            self.all.until(self._has_settled, within_s=2000)
        finally:
            self.all.close()

    def _has_settled(self) -> bool:
        job = self.all.job
        if job.plan is not None or job.incident is not None:
            return False
        if job.state is WorkloadState.STOPPED:
            return bool(job.reason)
        return job.state is WorkloadState.RUNNING and len(job.places) == job.spec.hosts


Machine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink what is found takes minutes
)
TestAnyOrder = Machine.TestCase


@pytest.fixture
def running() -> Iterator[Whole]:
    made = Whole(spec(), len(NAMES))
    try:
        made.until(lambda: made.job is not None and made.job.state is WorkloadState.RUNNING)
        yield made
    finally:
        made.close()


def live(made: Whole) -> Plan:
    (plan,) = [plan for plan in made.journal.plans.values() if plan.step is not None]
    return plan


@pytest.mark.parametrize("hook", ["hangs", "slow"])
def test_the_program_of_a_plan_that_is_overtaken_is_ended(running: Whole, hook: str) -> None:
    running.hook_behaves = hook
    running.observed("h-0", ObservationKind.WORKER_LOST, rank=0)
    running.until(lambda: bool(running.own_now), within_s=3)
    number = live(running).number
    running.observed("h-1", ObservationKind.DEVICE_FAULT, device="0", device_class=DeviceClass.SWAP)
    running.until(lambda: running.journal.plans[number].outcome is Outcome.OVERTAKEN, within_s=3)
    assert number not in {plan for plan, _ in running.own_now}
    running.hook_behaves = "works"
    running.until(lambda: running.job.incident is None)


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, -1)])
def test_an_answer_of_another_plan_step_or_generation_is_none(running: Whole, shift: tuple[int, int, int]) -> None:
    running.hosts["h-0"].behaves[StepKind.RESET_DEVICES] = "hangs"
    running.observed("h-0", ObservationKind.DEVICE_FAULT, device="0", device_class=DeviceClass.RESET)
    running.pass_time(1.0)
    plan = live(running)
    assert plan.step is not None and plan.step.kind is StepKind.RESET_DEVICES
    wrong = StepEnded(plan=plan.number + shift[0], at=plan.at + shift[1], generation=plan.generation + shift[2])
    running.hosts["h-0"].say(wrong)
    running.pass_time(0.5)
    assert live(running).at == plan.at
    running.until(lambda: running.job.incident is None)
    assert running.journal.plans[plan.number].outcome is not Outcome.DONE


@pytest.mark.parametrize("when", ["before", "after"])
def test_whenever_it_is_killed_a_step_is_carried_out_once(running: Whole, when: str) -> None:
    """Around each transaction of a remedy, one after the other."""
    for count in range(12):
        running.until(lambda: all(host.link is not None for host in running.hosts.values()), within_s=5)
        begun = len(running.journal.plans)
        running.journal.dies, running.journal.dies_at = when, count + 1
        running.observed("h-0", ObservationKind.DEVICE_FAULT, device=str(count), device_class=DeviceClass.RESET)
        running.pass_time(1.0)
        if running.journal.dies:  # the remedy has fewer transactions
            assert count >= 5
            running.journal.dies = ""
            running.until(lambda: running.job.incident is None)
            break
        running.until(lambda: running.job.incident is None)
        # Killed before the first transaction, it has not heard of it; a monitor says it again, which is not simulated.
        assert len(running.journal.plans) > begun or (when, count) == ("before", 0)
        running.until(lambda: running.job.state is WorkloadState.RUNNING)
    assert {plan.outcome for plan in running.journal.plans.values()} == {Outcome.DONE}


@pytest.mark.parametrize("turns", range(-2, 5))
def test_it_ends_when_it_is_told_to_in_the_moment_of_a_message(running: Whole, turns: int) -> None:
    """The message is so many turns of the event loop later, or earlier. Waits of Python before 3.12 forget a cancellation
    that comes in the moment in which they end."""
    service, task = running.service, running._running
    assert service is not None and task is not None
    running.loop.pass_time(0.05)  # it waits for something to look at
    acts = (service.stop, service._due.set) if turns >= 0 else (service._due.set, service.stop)
    acts[0]()
    for _ in range(abs(turns)):
        running.loop.call_soon(running.loop.stop)
        running.loop.run_forever()
    acts[1]()
    running.loop.pass_time(1.0)
    assert task.done()
    running.service = None
    running.start()
