"""Who leads, of those that share a Lease."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from resiliency.supervisor.clusters.kubernetes import KubernetesLease
from resiliency.supervisor.clusters.kubernetes import lease as lease_module
from resiliency.supervisor.clusters.kubernetes.api import KubernetesApi
from resiliency.supervisor.store import LeadershipLost, StateUnavailable

from .background import Background
from .fake_api import Drop, FakeApi, Refuse, Silence
from .servers import RealServer

pytestmark = pytest.mark.usefixtures("in_a_hurry")

LEASE_S = 0.9  # half of it is what a request may take, which is real
LEASES, NAME = "/apis/coordination.k8s.io/v1/namespaces/system/leases", "supervisor"


class Clock:
    """Monotonic seconds of all processes."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Two:
    """Two supervisors with one Lease, and one more at each :meth:`another`."""

    def __init__(self, fake: FakeApi) -> None:
        self.fake, self.clock, self.background = fake, Clock(), Background()
        self.background.call(fake.__aenter__())
        self._apis: list[KubernetesApi] = []
        self.leader, self.other = self.another("one"), self.another("other")

    def another(self, name: str) -> KubernetesLease:
        self._apis.append(KubernetesApi(self.fake.access))
        return KubernetesLease(
            self._apis[-1], name=NAME, me=name, lease_s=LEASE_S, loop=self.background.loop, clock=self.clock
        )

    def held(self) -> tuple[bool, bool]:
        return self.leader.is_held(), self.other.is_held()

    def passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def do(self, work: Callable[[], Any]) -> None:
        """Something that somebody else does with the server."""

        async def done() -> None:
            work()

        self.background.call(done())

    def annotate(self) -> None:
        self.do(lambda: self.fake.change(LEASES, NAME, {"metadata": {"annotations": {"note": str(self.clock.now_s)}}}))

    def delete(self) -> None:
        self.do(lambda: self.fake.remove(LEASES, NAME))

    def close(self) -> None:
        for api in self._apis:
            self.background.call(api.close())
        self.background.call(self.fake.__aexit__())
        self.background.close()


@pytest.fixture
def two(fake_api: FakeApi) -> Iterator[Two]:
    made = Two(fake_api)
    yield made
    made.close()


def test_one_of_two_gets_it_and_keeps_it_while_it_renews_it(two: Two) -> None:
    assert two.leader.acquire() and two.other.acquire() is None
    assert two.other.holder == "one"
    for _ in range(5):
        two.passes(0.9 * LEASE_S)
        two.leader.renew()
        assert two.other.acquire() is None and two.held() == (True, False)


def test_one_that_does_not_renew_it_may_not_act_before_another_one_may(two: Two) -> None:
    term = two.leader.acquire()
    two.passes(LEASE_S / 2)
    assert two.other.acquire() is None
    two.passes(LEASE_S / 2)
    assert two.held() == (False, False) and two.other.acquire() is None
    two.passes(1.0)  # an object has whole seconds
    later = two.other.acquire()
    assert term and later and later > term and two.held() == (False, True)
    with pytest.raises(LeadershipLost, match=f"other leads, in term {later}; this was {term}"):
        two.leader.renew()
    two.leader.release()
    assert two.held() == (False, True) and two.leader.acquire() is None


def test_one_that_nobody_has_replaced_goes_on_in_its_term(two: Two) -> None:
    term = two.leader.acquire()
    two.passes(10 * LEASE_S)
    assert two.held() == (False, False)
    two.leader.renew()
    assert two.held() == (True, False) and two.other.acquire() is None
    two.leader.release()
    assert term is not None and (two.leader.acquire() or 0) > term


def test_a_slow_server_lengthens_no_lease(two: Two) -> None:
    """The holder counts from before it has asked, another one from after it was answered."""
    two.leader.acquire()
    two.fake.meanwhile("PATCH", lambda: two.passes(LEASE_S))
    two.leader.renew()
    assert two.held() == (False, False)

    assert two.other.acquire() is None
    two.leader.renew()
    two.fake.meanwhile("GET", lambda: two.passes(10.0))
    assert two.other.acquire() is None and two.other.acquire() is None
    two.passes(0.9)
    assert two.other.acquire() is None
    two.fake.meanwhile("PATCH", lambda: two.passes(LEASE_S))
    two.passes(0.2)
    assert two.other.acquire() and two.held() == (False, False)


@pytest.mark.parametrize("wall_s", [0.0, 1e9, 4e9])
def test_no_jump_of_the_wall_clock_takes_a_lease_or_makes_a_term_smaller(
    two: Two, monkeypatch: pytest.MonkeyPatch, wall_s: float
) -> None:
    term = two.leader.acquire()

    class Wall:
        time, monotonic = staticmethod(lambda: wall_s), two.clock

    monkeypatch.setattr(lease_module, "time", Wall)
    assert two.other.acquire() is None and two.held() == (True, False)
    two.passes(1.0)
    later = two.other.acquire()
    assert term is not None and later == max(term + 1, int(wall_s))


def test_one_that_gives_it_back_is_followed_at_once(two: Two) -> None:
    term = two.leader.acquire()
    assert two.other.acquire() is None
    two.leader.release()
    two.leader.release()
    assert not two.leader.is_held() and (two.other.acquire() or 0) > (term or 0)


@pytest.mark.parametrize("verb", ["POST", "PATCH"])
def test_of_two_that_try_at_once_one_gets_it(two: Two, verb: str) -> None:
    if verb == "PATCH":
        two.another("former").acquire()
        assert two.leader.acquire() is None is two.other.acquire()
        two.passes(1.0)
    met = threading.Barrier(2)
    found: list[int | None] = []

    def take(lease: KubernetesLease) -> None:
        met.wait(30)
        found.append(lease.acquire())

    threads = [threading.Thread(target=take, args=(lease,)) for lease in (two.leader, two.other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(term is not None for term in found) == 1 and sum(two.held()) == 1


def test_one_that_decides_on_what_is_over_is_refused(two: Two) -> None:
    two.fake.meanwhile("POST", lambda: two.fake.put(LEASES, {"metadata": {"name": NAME}, "spec": {"holderIdentity": "x"}}))  # fmt: skip
    assert two.leader.acquire() is None and two.held() == (False, False)
    two.passes(1.0)
    assert two.leader.acquire() is None
    two.passes(1.0)
    two.fake.meanwhile("PATCH", lambda: two.fake.change(LEASES, NAME, {"spec": {"holderIdentity": "y"}}))
    assert two.leader.acquire() is None and two.held() == (False, False)


def test_who_annotates_it_takes_it_from_nobody(two: Two) -> None:
    two.leader.acquire()
    for _ in range(3):
        two.annotate()
        two.passes(0.1)
        two.leader.renew()
        assert two.held() == (True, False)
    two.fake.meanwhile("PATCH", two.fake.forget)
    two.leader.renew()


def test_a_lease_that_somebody_deletes_is_taken_by_nobody_while_its_holder_acts(two: Two) -> None:
    term = two.leader.acquire()
    assert two.other.acquire() is None
    two.passes(0.3)
    two.delete()
    assert two.other.acquire() is None and two.held() == (True, False)
    with pytest.raises(LeadershipLost, match="nobody leads"):
        two.leader.renew()
    assert two.held() == (False, False) and two.leader.acquire() is None is two.other.acquire()
    two.passes(1.0)
    later = two.other.acquire()
    assert later and term and later > term and two.leader.acquire() is None


def test_one_that_is_not_allowed_to_hold_it_says_so(two: Two) -> None:
    two.leader.acquire()
    two.fake.fail(Refuse(403), times=2)
    for each in (two.leader.renew, two.other.acquire):
        with pytest.raises(StateUnavailable, match="403.*Role"):
            each()
    assert not two.leader.is_out_of_reach
    two.leader.renew()


@pytest.mark.parametrize("fault", [Refuse(503), Refuse(429), Drop(), Silence()])
def test_a_server_that_is_away_ends_no_leadership_and_lets_nobody_act(two: Two, fault: Refuse | Drop | Silence) -> None:
    two.leader.acquire()
    assert not two.leader.is_out_of_reach
    two.fake.fail(fault, times=1000)
    two.passes(LEASE_S)
    for each in (two.leader.renew, two.other.acquire):
        with pytest.raises(StateUnavailable, match="tried for"):
            each()
    assert two.held() == (False, False)
    assert two.leader.is_out_of_reach and not two.other.is_out_of_reach, "who never led has nothing to go on with"
    two.leader.release()
    two.do(two.fake.mend)
    two.leader.renew()
    assert two.held() == (True, False) and not two.leader.is_out_of_reach


def test_a_process_that_was_stopped_while_the_server_was_away_does_not_go_on(two: Two) -> None:
    """Another one may have reached the server meanwhile."""
    two.leader.acquire()
    two.other.acquire()
    two.fake.fail(Refuse(503), times=1000)
    with pytest.raises(StateUnavailable):
        two.leader.renew()
    two.passes(0.9 * LEASE_S)
    assert two.leader.is_out_of_reach
    two.passes(0.2 * LEASE_S)
    assert not two.leader.is_out_of_reach
    two.do(two.fake.mend)
    two.passes(1.0)
    assert two.other.acquire()
    with pytest.raises(LeadershipLost):
        two.leader.renew()
    assert not two.leader.is_out_of_reach


@pytest.mark.parametrize("verb", ["PATCH", "POST"])
def test_an_answer_that_is_lost_makes_no_second_holder(two: Two, verb: str) -> None:
    two.fake.fail(Drop(done=True), lambda each, path: each == verb)
    if verb == "POST":
        assert two.leader.acquire() is None is two.other.acquire() is two.leader.acquire()
        two.passes(1.0)
        assert two.leader.acquire() and two.other.acquire() is None
    else:
        assert two.leader.acquire()
        two.leader.renew()
        assert two.held() == (True, False)


def test_a_loop_that_has_ended_is_no_reason_to_wait_for_ever(fake_api: FakeApi) -> None:
    background = Background()
    api = KubernetesApi(type("Nowhere", (), {"namespace": "system", "server": "", "token_file": ""})())
    lease = KubernetesLease(api, name=NAME, me="one", lease_s=LEASE_S, loop=background.loop)
    background.close()
    with pytest.raises(StateUnavailable, match="closed"):
        lease.acquire()
    lease.release()


def test_a_real_server_keeps_the_same_promises(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server = RealServer(request.getfixturevalue("rig"), tmp_path)
    clock, background = Clock(), Background()
    apis = [KubernetesApi(server.access) for _ in range(2)]
    one, other = (
        KubernetesLease(api, name=NAME, me=me, lease_s=5.0, loop=background.loop, clock=clock)
        for api, me in zip(apis, ("one", "other"), strict=True)
    )
    try:
        term = one.acquire()
        assert term and other.acquire() is None and other.holder == "one"
        clock.now_s += 4.9
        one.renew()
        path = f"/apis/coordination.k8s.io/v1/namespaces/{server.own}/leases/{NAME}"
        server.change(path, {"metadata": {"annotations": {"note": "x"}}})
        one.renew()
        assert other.acquire() is None
        clock.now_s += 5.0
        later = other.acquire()
        assert later and later > term and not one.is_held()
        with pytest.raises(LeadershipLost, match="other leads"):
            one.renew()
        other.release()
        assert (one.acquire() or 0) > later
        one.release()
        assert [(verb, code) for verb, _, code in server.writes(7)] == [
            ("CREATE", 201), ("PATCH", 200), ("PATCH", 409), ("PATCH", 200),
            ("PATCH", 200), ("PATCH", 409), ("PATCH", 200), ("PATCH", 200), ("PATCH", 200),
        ]  # fmt: skip
    finally:
        for api in apis:
            background.call(api.close())
        background.close()


# -- in any order ------------------------------------------------------------------------------------------------------


class Supervisors(RuleBasedStateMachine):
    """Two processes do what they do, or are stopped, or start anew; a person and the server interfere."""

    certificates: Any

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.two = Two(FakeApi(*self.certificates, Path(self.folder.name)))
        self.leases = [self.two.leader, self.two.other]
        self.terms: list[int] = []
        #: Until when each may act at most: one duration after it began the last call that gave it the lease.
        self.until_s = [0.0, 0.0]
        for at in (0, 1):
            self.acquire(at)

    def teardown(self) -> None:
        self.two.close()
        self.folder.cleanup()

    def acquire(self, at: int) -> None:
        if self.leases[at].is_held():
            return  # it would renew it
        began_s = self.two.clock.now_s
        with contextlib.suppress(StateUnavailable):
            term = self.leases[at].acquire()
            if term is not None:
                assert not self.terms or term > self.terms[-1]
                self.terms.append(term)
                assert not self.leases[1 - at].is_held()
                self.until_s[at] = max(began_s, self.two.clock.now_s) + LEASE_S

    @rule(at=st.integers(0, 1))
    def stands_by(self, at: int) -> None:
        self.acquire(at)

    @rule(at=st.integers(0, 1))
    def renews(self, at: int) -> None:
        if not self.until_s[at]:
            return  # it has never led
        began_s = self.two.clock.now_s
        try:
            self.leases[at].renew()
            self.until_s[at] = began_s + LEASE_S
        except LeadershipLost:
            self.until_s[at] = 0.0
            assert not self.leases[at].is_held() and not self.leases[at].is_out_of_reach
        except StateUnavailable:
            pass

    @rule(at=st.integers(0, 1))
    def releases(self, at: int) -> None:
        self.leases[at].release()
        self.until_s[at] = 0.0
        assert not self.leases[at].is_held()

    @rule(seconds=st.sampled_from([0.05, 0.2, LEASE_S, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.two.passes(seconds)

    @rule(verb=st.sampled_from(["GET", "PATCH", "POST"]), seconds=st.sampled_from([0.1, LEASE_S, 1.0]))
    def a_request_will_be_slow(self, verb: str, seconds: float) -> None:
        self.two.fake.meanwhile(verb, lambda: self.two.passes(seconds))

    @rule(fault=st.sampled_from([Refuse(503), Drop(), Drop(done=True)]))
    def a_request_will_fail(self, fault: Refuse | Drop) -> None:
        self.two.fake.fail(fault)

    def there(self) -> bool:
        return NAME in self.two.fake.objects.get(LEASES, {})

    @precondition(there)
    @rule()
    def a_person_annotates_it(self) -> None:
        self.two.annotate()

    @precondition(there)
    @rule()
    def a_person_deletes_it(self) -> None:
        self.two.do(self.two.fake.mend)
        for at in (0, 1, 0, 1):  # whoever stands by looks several times within a duration
            self.acquire(at)
        self.two.delete()

    @invariant()
    def at_most_one_acts_and_none_for_longer_than_it_may(self) -> None:
        assert sum(self.two.held()) <= 1
        for lease, until_s in zip(self.leases, self.until_s, strict=True):
            assert not lease.is_held() or self.two.clock.now_s < until_s


def test_whatever_happens_at_most_one_acts(certificates: Any) -> None:
    made = type("Made", (Supervisors,), {"certificates": certificates})
    run_state_machine_as_test(
        made,
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
