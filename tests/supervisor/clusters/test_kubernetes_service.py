"""What a supervisor does with what its cluster says, and what it tells the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError
from resiliency.runtime.messages.monitor import PROTOCOL_VERSION, Hello, Observed, Report, StepEnded
from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.supervisor import actuator as actuator_module
from resiliency.supervisor.clusters.base import ClusterUnavailable, HostFacts, Identity
from resiliency.supervisor.clusters.kubernetes import cluster as cluster_module
from resiliency.supervisor.clusters.kubernetes.facts import FAILED
from resiliency.supervisor.clusters.none import NoCluster
from resiliency.supervisor.clusters.registry import CLUSTERS
from resiliency.supervisor.model import HostState, WorkloadState
from resiliency.supervisor.server import Supervisor
from resiliency.supervisor.store import StateUnavailable

from ..fake_monitors import TIMEOUT_S, FakeMonitor, asked, job, leading, monitors, settings, until, url_of
from .fake_api import Drop, FakeApi
from .servers import FakeServer

pytestmark = pytest.mark.usefixtures("in_a_hurry")


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


class Scripted(NoCluster):
    """Says what the test says; host ``a`` is on node ``node-a``. Attributes: out, up: what it was told."""

    def __init__(self, hosts: str = "") -> None:
        self.facts = {host: HostFacts(host=host, node=f"node-{host}") for host in hosts}
        self.out: list[tuple[str, str]] = []
        self.up: list[tuple[str, str]] = []
        self.problem, self.hangs = "", False
        self._changed: Callable[[HostFacts], None] = lambda facts: None

    async def run(self, changed: Callable[[HostFacts], None]) -> None:
        self._changed = changed
        for facts in self.facts.values():
            changed(facts)
        await asyncio.Event().wait()

    def say(self, host: str, **values: Any) -> None:
        self.facts[host] = HostFacts(host=host, node=f"node-{host}", **values)
        self._changed(self.facts[host])

    async def take_out(self, host: str, reason: str, *, is_dead: bool) -> str:
        self.out.append((host, "dead" if is_dead else "alive"))
        if self.hangs:
            await asyncio.Event().wait()
        return self.problem

    async def give_up(self, job: str, reason: str) -> str:
        self.up.append((job, reason))
        return self.problem


def places(supervisor: Supervisor, name: str = "job") -> tuple[str, ...]:
    assert supervisor.service is not None
    workload = supervisor.service.decided.workloads.get(name)
    return () if workload is None or workload.state is not WorkloadState.RUNNING else workload.places


def state(supervisor: Supervisor, host: str) -> HostState | None:
    return None if supervisor.service is None else supervisor.service.sensor.state_of(host)


async def lose(named: Iterable[FakeMonitor], lost: str) -> None:
    """A host falls silent, and the others make no steps until it is replaced."""
    for each in named:
        each.trains = False
    for each in named:
        if each.name == lost:
            await each.die()


async def replaced(supervisor: Supervisor, named: Iterable[FakeMonitor], lost: str, hosts: int) -> None:
    """All hosts have places, and make steps again."""
    trained = {each.name: each.step for each in named}

    def have_places() -> bool:
        assert supervisor.service is not None
        given = supervisor.service.decided.workloads["job"].places
        return lost not in given and len(given) == hosts == sum(each.place is not None for each in named if each.name != lost)  # fmt: skip

    await until(have_places)
    for each in named:
        each.trains = True
    await until(lambda: all(each.step > trained[each.name] for each in named if each.name != lost and each.place))


def test_a_host_that_the_cluster_wants_empty_is_emptied_and_is_free_again_when_it_does_not(tmp_path: Path) -> None:
    """Also when the supervisor is started again in between. A cordon of an operator is the operator's."""

    async def work() -> None:
        made, cluster = settings(tmp_path), Scripted("abcd")
        async with leading(made, cluster=cluster) as supervisor:
            async with monitors(url_of(supervisor), *"abcd"):
                await until(lambda: sorted(places(supervisor)) == ["a", "b"])
                assert supervisor.service is not None and supervisor.service.drain("d", "by hand")
                cluster.say("a", unwanted="node node-a is cordoned")
                cluster.say("d", unwanted="node node-d is cordoned")
                await until(lambda: set(places(supervisor)) == {"b", "c"})
                known = supervisor.service.sensor.host("a")
                assert known is not None and known.state is HostState.CORDONED
                assert known.reason == "out of use: node node-a is cordoned"
                cluster.say("a")
                await until(lambda: state(supervisor, "a") is HostState.READY)
                cluster.say("a", unwanted="node node-a is cordoned again")
                await until(lambda: state(supervisor, "a") is HostState.CORDONED)
        for host in "ad":
            cluster.facts[host] = HostFacts(host=host, node=f"node-{host}")
        async with leading(made, cluster=cluster) as supervisor, monitors(url_of(supervisor), *"abcd"):
            await until(lambda: state(supervisor, "a") is HostState.READY)
            assert state(supervisor, "d") is HostState.CORDONED

    run(work)


def test_a_host_that_the_cluster_wants_empty_before_it_connects_gets_no_ranks(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Scripted("abc")
        async with leading(settings(tmp_path), cluster=cluster) as supervisor:
            cluster.say("a", unwanted="node node-a is cordoned")
            async with monitors(url_of(supervisor), "a"):
                await until(lambda: state(supervisor, "a") is HostState.CORDONED)
                async with monitors(url_of(supervisor), "b", "c"):
                    await until(lambda: set(places(supervisor)) == {"b", "c"})

    run(work)


def test_the_failure_domain_of_a_host_is_what_the_cluster_says(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Scripted()
        cluster.facts["a"] = HostFacts(host="a", node="n", block="block-7")
        async with leading(settings(tmp_path), cluster=cluster) as supervisor, monitors(url_of(supervisor), "a"):
            await until(lambda: state(supervisor, "a") is not None)
            assert supervisor.service is not None
            known = supervisor.service.sensor.host("a")
            assert known is not None and known.block == "block-7"

    run(work)


def test_a_host_whose_pod_is_gone_is_replaced_at_once(tmp_path: Path) -> None:
    """Its monitor may be heard of still."""

    async def work() -> None:
        cluster = Scripted("abc")
        async with leading(settings(tmp_path), cluster=cluster) as supervisor:
            async with monitors(url_of(supervisor), *"abc"):
                await until(lambda: sorted(places(supervisor)) == ["a", "b"])
                cluster.say("a", is_gone=True)
                await until(lambda: set(places(supervisor)) == {"b", "c"})
                assert any("its pod was deleted (node node-a)" in each.text for each in supervisor.store.events())

    run(work)


def test_an_incident_names_the_node_of_a_host(tmp_path: Path) -> None:
    """Whose pod, and so whose name, is soon gone."""

    async def work() -> None:
        async with leading(settings(tmp_path), cluster=Scripted("abc")) as supervisor:
            async with monitors(url_of(supervisor), *"abc") as named:
                await until(lambda: sorted(places(supervisor)) == ["a", "b"])
                await lose(named, "a")
                await until(lambda: any(each.kind == "host_lost" for each in supervisor.store.events()))
                (lost,) = (each for each in supervisor.store.events() if each.kind == "host_lost")
                assert lost.text.endswith(" s (node node-a)"), lost.text

    run(work)


# -- watchdogs of machines ---------------------------------------------------------------------------------------------


class Vouching(Scripted):
    """Believes that tokens are names, and that of "watch-N" a watchdog of node N."""

    vouches = True

    def __init__(self, hosts: str = "") -> None:
        super().__init__(hosts)
        self.is_away = False

    async def identify(self, token: str) -> Identity | None:
        if self.is_away:
            raise ClusterUnavailable("the API server is away")
        if token.startswith("watch-"):
            node = token.removeprefix("watch-")
            return Identity(host=node, node=node, watches_node=True)
        return Identity(host=token, node=f"node-{token}") if token in self.facts else None


def secure(folder: Path, **values: Any) -> Any:
    (folder / "operator").write_text("o" * 20)
    (folder / "operator").chmod(0o600)
    given = {"insecure_no_authentication": False, "operator_token": str(folder / "operator"), "cluster": "kubernetes"}
    return settings(folder, **{**given, **values})


@pytest.fixture
def vouching(monkeypatch: pytest.MonkeyPatch) -> Vouching:
    made = Vouching("abc")
    monkeypatch.setitem(CLUSTERS, "kubernetes", lambda settings: (made, Lease()))
    return made


class Lease:
    """Held, or out of reach, as the test says."""

    looks_every_s, holder = 0.02, ""

    def __init__(self) -> None:
        self.held, self.is_out_of_reach = True, False

    def acquire(self) -> int | None:
        return 1 if self.held else None

    def renew(self) -> None:
        if not self.held:
            raise StateUnavailable("it cannot be reached")

    def is_held(self) -> bool:
        return self.held

    def release(self) -> None:
        return


class Watchdog(FakeMonitor):
    """Of a machine: says nothing by itself."""

    async def _beat(self) -> None:
        return

    async def said(self, kind: ObservationKind, **values: Any) -> None:
        given = {"host": self.name, **values}
        await self.send(Observed(observations=(Observation(kind=kind, **given),)))


def test_what_watchdogs_of_a_machine_see_concerns_the_hosts_that_run_there(tmp_path: Path, vouching: Vouching) -> None:
    async def work() -> None:
        async with leading(secure(tmp_path)) as supervisor:
            url = url_of(supervisor)
            async with (
                FakeMonitor(url, "a", token="a"),
                FakeMonitor(url, "b", token="b"),
                FakeMonitor(url, "c", token="c"),
                Watchdog(url, "node-a", token="watch-node-a") as watchdog,
            ):
                await until(lambda: sorted(places(supervisor)) == ["a", "b"] and watchdog.welcome)
                assert state(supervisor, "node-a") is None
                await watchdog.said(
                    ObservationKind.DEVICE_FAULT, device="gpu-3", device_class=DeviceClass.SWAP, detail="XID 79"
                )
                await until(lambda: set(places(supervisor)) == {"b", "c"})
                assert watchdog.desired is None and state(supervisor, "node-a") is None

    run(work)


def test_a_lasting_problem_of_a_machine_keeps_ranks_away_until_it_is_over(tmp_path: Path, vouching: Vouching) -> None:
    async def work() -> None:
        made = secure(tmp_path, workloads=[job(replicas=1)])
        async with leading(made) as supervisor:
            url = url_of(supervisor)
            async with Watchdog(url, "node-a", token="watch-node-a") as watchdog:
                await until(lambda: watchdog.welcome)
                await watchdog.send(Report(number=1, problem="its disk is full"))
                async with FakeMonitor(url, "a", token="a") as host:
                    await until(lambda: host.welcome)
                    await until(lambda: state(supervisor, "a") is HostState.QUARANTINED)
                    await asyncio.sleep(0.3)
                    assert places(supervisor) == ()
                    assert supervisor.service is not None
                    await watchdog.send(Report(number=2, problem=""))
                    assert supervisor.service.drain("a", "") and supervisor.service.uncordon("a")
                    await until(lambda: places(supervisor) == ("a",))

    run(work)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (StepEnded(plan=1, at=0, generation=1), "do not send StepEnded"),
        (Hello(version=PROTOCOL_VERSION, host="node-a", incarnation="x"), "do not send Hello"),
        (Observed(observations=(Observation(kind=ObservationKind.DRAIN, host="a"),)), "node-a speak of a"),
        (Observed(observations=(Observation(kind=ObservationKind.WORKER_LOST, workload="job"),)), "do not see"),
    ],
)
def test_watchdogs_say_nothing_else_and_of_no_other_machine(
    tmp_path: Path, vouching: Vouching, message: Any, said: str
) -> None:
    async def work() -> None:
        async with leading(secure(tmp_path)) as supervisor:
            async with Watchdog(url_of(supervisor), "node-a", token="watch-node-a") as watchdog:
                await until(lambda: watchdog.welcome)
                await watchdog.send(message)
                await until(lambda: watchdog.refused)
                assert said in watchdog.refused and state(supervisor, "node-a") is None

    run(work)


def test_tokens_of_the_cluster_bind_hosts_to_their_names(tmp_path: Path, vouching: Vouching) -> None:
    async def work() -> None:
        async with leading(secure(tmp_path)) as supervisor:
            url = url_of(supervisor)
            async with (
                FakeMonitor(url, "a", token="a") as good,
                FakeMonitor(url, "b", token="a") as other,
                FakeMonitor(url, "x", token="x") as unknown,
                FakeMonitor(url, "node-b", token="watch-node-a") as elsewhere,
                FakeMonitor(url, "c") as nobody,
            ):
                await until(lambda: good.welcome and other.refused and unknown.refused and nobody.refused)
                await until(lambda: elsewhere.refused)
                assert "not that of a host named 'b'" in other.refused and "'node-b'" in elsewhere.refused
                assert unknown.refused == nobody.refused == "401"
            vouching.is_away = True
            assert (await asked(supervisor, "/v1/monitor", token="a"))[0] == 503
            assert (await asked(supervisor, "/v1/status", token="a"))[0] == 401
            assert (await asked(supervisor, "/v1/status", token="o" * 20))[0] == 200

    run(work)


# -- a lease that cannot be reached ------------------------------------------------------------------------------------


def test_while_the_lease_is_out_of_reach_the_one_with_most_hosts_goes_on(
    tmp_path: Path, vouching: Vouching, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease()

    monkeypatch.setitem(CLUSTERS, "kubernetes", lambda settings: (vouching, lease))

    async def work() -> None:
        async with leading(secure(tmp_path, workloads=[job(replicas=3)])) as supervisor:
            url = url_of(supervisor)
            vouching.facts |= {"d": HostFacts(host="d", node="node-d")}
            named = {name: FakeMonitor(url, name, token=name) for name in "abcd"}
            for each in named.values():
                await each.__aenter__()
            await until(lambda: len(places(supervisor)) == 3)
            service = supervisor.service
            assert service is not None and service.leads()
            service.cluster_says(vouching.facts["d"])
            lease.held = False
            await until(lambda: not service.leads())
            lease.is_out_of_reach = True
            await until(service.leads)
            lost = places(supervisor)[0]
            await lose(named.values(), lost)
            await replaced(supervisor, named.values(), lost, 3)
            for name in await until(lambda: places(supervisor)[:2]):
                await named[name].die()
            await until(lambda: not service.leads())
            assert (await asked(supervisor, "/readyz"))[0] == 503
            for name in "abcd":
                await named[name].die()
            assert not service.leads()
            lease.held = True
            await until(service.leads)

    run(work)


# -- a state file that is damaged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["bytes", "row", "meta"])
def test_a_damaged_state_file_is_put_aside_and_the_supervisor_begins_with_nothing(
    tmp_path: Path, vouching: Vouching, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that run are taken over then, see test_adoption.py."""

    def harm(state: Path) -> None:
        if damage == "bytes":
            state.write_bytes(b"x" * 8192)
            return
        with contextlib.closing(sqlite3.connect(state)) as db, db:
            db.execute("UPDATE workloads SET value = '{'" if damage == "row" else "DELETE FROM meta WHERE key = 'term'")

    async def work() -> None:
        made = secure(tmp_path)
        for _ in range(2):
            async with leading(made) as supervisor:
                url = url_of(supervisor)
                async with FakeMonitor(url, "a", token="a"), FakeMonitor(url, "b", token="b"):
                    await until(lambda: places(supervisor))
            harm(Path(made.state))
        (line,) = [each.getMessage() for each in caplog.records if "damaged" in each.getMessage()]
        assert f"It is now {made.state}.damaged" in line and Path(f"{made.state}.damaged").exists()

    run(work)


def test_a_damaged_file_that_holds_the_lease_too_is_left_where_it_is(tmp_path: Path) -> None:
    made = settings(tmp_path)
    Path(made.state).write_bytes(b"x" * 8192)
    with pytest.raises(ConfigError, match="damaged.*move it away"):
        Supervisor(made)
    assert Path(made.state).read_bytes() == b"x" * 8192


# -- what the cluster is told ------------------------------------------------------------------------------------------


def test_a_spare_that_dies_is_taken_out_and_again_while_its_pod_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actuator_module, "_AGAIN_S", 0.3)

    async def work() -> None:
        cluster = Scripted("abc")
        async with leading(settings(tmp_path), cluster=cluster) as supervisor:
            async with monitors(url_of(supervisor), *"abcz") as named:
                await until(lambda: len(places(supervisor)) == 2)
                spares = [each for each in named if each.name not in places(supervisor)]
                assert {"c", "z"} == {each.name for each in spares}
                for each in spares:
                    await each.die()
                cluster.problem = "the API server is away"
                await until(lambda: len(cluster.out) >= 2)
                cluster.problem = ""
                assert set(cluster.out) == {("c", "dead")}, "of z no pod is known"
                assert len(places(supervisor)) == 2
                cluster.say("c", is_gone=True)
                told = len(cluster.out)
                await asyncio.sleep(2 * TIMEOUT_S)
                assert len(cluster.out) == told
                service = supervisor.service
                assert service is not None and service.sensor.host("c") is None, "it never comes back"

    run(work)


def test_a_host_with_ranks_is_told_of_by_its_plan_alone(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Scripted("abc")
        async with leading(settings(tmp_path), cluster=cluster) as supervisor:
            async with monitors(url_of(supervisor), *"abc") as named:
                await until(lambda: len(places(supervisor)) == 2)
                lost, _ = places(supervisor)
                await lose(named, lost)
                await replaced(supervisor, named, lost, 2)
                await until(lambda: cluster.out == [(lost, "dead")])

    run(work)


def test_a_cluster_that_does_not_answer_holds_up_no_further_swap(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Scripted("abcd")
        cluster.hangs = True
        async with leading(settings(tmp_path), cluster=cluster) as supervisor:
            async with monitors(url_of(supervisor), *"abcd") as named:
                await until(lambda: len(places(supervisor)) == 2)
                for _ in range(2):
                    assert supervisor.service is not None
                    lost, _ = supervisor.service.decided.workloads["job"].places
                    await lose(named, lost)
                    named = [each for each in named if each.name != lost]
                    await replaced(supervisor, named, lost, 2)
                await until(lambda: len(cluster.out) >= 2)

    run(work)


def test_an_incident_is_over_when_ranks_train_and_the_cluster_is_told_until_it_has_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a drained host, which lives; also by the next supervisor."""
    monkeypatch.setattr(actuator_module, "_AGAIN_S", 0.2)

    async def work() -> None:
        made, cluster = settings(tmp_path), Scripted("abc")
        cluster.hangs = True
        async with leading(made, cluster=cluster) as supervisor:
            async with monitors(url_of(supervisor), *"abc"):
                await until(lambda: len(places(supervisor)) == 2)
                drained, _ = places(supervisor)
                cluster.say(drained, unwanted="its node is cordoned")
                await until(lambda: drained not in places(supervisor) and len(places(supervisor)) == 2)
                service = supervisor.service
                assert service is not None and service.controller.workloads["job"].incident is None
                await until(lambda: cluster.out == [(drained, "alive")])
        cluster.hangs, cluster.problem = False, "the API server is away"
        async with leading(made, cluster=cluster) as supervisor, monitors(url_of(supervisor), *"abc"):
            await until(lambda: len(cluster.out) >= 3)
            assert set(cluster.out) == {(drained, "alive")}
            cluster.say(drained, is_gone=True)
            told = len(cluster.out)
            await asyncio.sleep(2.5)
            assert len(cluster.out) == told

    run(work)


@pytest.mark.parametrize("others", ["none", "run", "completed", "by hand"])
def test_a_job_that_is_given_up_is_said_when_no_other_needs_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """Again and again, because the API server may be away, until it is started again."""
    monkeypatch.setattr(actuator_module, "_AGAIN_S", 0.2)

    async def work() -> None:
        cluster = Scripted("ab")
        cluster.facts = {host: HostFacts(host=host, job="train") for host in "ab"}
        specs = [job(replicas=1, max_workload_restarts=0, max_in_job_restarts=0)]
        if others in ("run", "completed"):
            specs.append(job(name="other", replicas=1))
        async with leading(settings(tmp_path, *specs), cluster=cluster) as supervisor:
            async with monitors(url_of(supervisor), "a", "b") as named:
                service = supervisor.service
                assert service is not None
                await until(lambda: places(supervisor) and (len(specs) == 1 or places(supervisor, "other")))
                if others == "completed":
                    next(each for each in named if each.name in places(supervisor, "other")).ended = True
                    await until(lambda: service.decided.workloads["other"].state is WorkloadState.COMPLETED)
                if others == "by hand":
                    assert service.stop_workload("job", "enough")
                else:
                    service.controller.stop("job", "its policy has given up", service.now_s(), 0.0)
                    service._collect()
                await until(lambda: service.decided.workloads["job"].state is WorkloadState.STOPPED)
                if others != "none":
                    await asyncio.sleep(1.5)
                    assert cluster.up == []
                    return
                cluster.problem = "the API server is away"
                await until(lambda: len(cluster.up) >= 2)
                assert set(cluster.up) == {("train", "its policy has given up")}
                assert service.start_workload("job")
                await until(lambda: places(supervisor))
                told = len(cluster.up)
                assert service.stop_workload("job", "enough")
                await asyncio.sleep(1.5)
                assert len(cluster.up) == told

    run(work)


# -- with the Kubernetes backend ---------------------------------------------------------------------------------------


def test_a_supervisor_of_kubernetes_leads_by_its_lease_lets_pods_in_and_cleans_up_after_a_lost_one(
    fake_api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_REVIEW_S", 0.2)

    async def work() -> None:
        server = FakeServer(fake_api)
        async with server:
            for name in "abcd":
                server.add_node(f"node-{name}", block="block-1")
                server.add_pod(name, f"node-{name}")
            given = {"server": server.access.server, "token_file": server.access.token_file, "block_label": "block"}
            given |= {"ca_file": server.access.ca_file, "namespace": "system", "workload_namespace": "jobs"}
            async with leading(secure(tmp_path, workloads=[job(replicas=3)], kubernetes=given)) as supervisor:
                leases = fake_api.objects["/apis/coordination.k8s.io/v1/namespaces/system/leases"]
                assert "process" in leases["resiliency-supervisor"]["spec"]["holderIdentity"]
                named = {name: FakeMonitor(url_of(supervisor), name, token=server.token(name)) for name in "abcd"}
                forged = FakeMonitor(url_of(supervisor), "a", token="forged")
                for each in (*named.values(), forged):
                    await each.__aenter__()
                await until(lambda: len(places(supervisor)) == 3 and forged.refused == "401")
                assert supervisor.service is not None
                known = supervisor.service.sensor.host("a")
                assert known is not None and known.block == "block-1"
                # The API server is away while a host is lost: its ranks go to the spare, and what is left is cleaned up.
                fake_api.fail(Drop(), times=100_000)
                lost, left, _ = places(supervisor)
                await lose(named.values(), lost)
                await replaced(supervisor, named.values(), lost, 3)
                # A monitor that connects again is who it was.
                await named[left].die()
                named[left] = FakeMonitor(url_of(supervisor), left, token=server.token(left), incarnation="1")
                await named[left].__aenter__()
                await until(lambda: named[left].welcome)
                fake_api.mend()
                await until(lambda: lost not in server.pods())
                node = server.node(f"node-{lost}")["spec"]
                assert node["unschedulable"] and node["taints"] == [{"key": FAILED, "effect": "NoSchedule"}]
                for each in named.values():
                    await each.die()
            assert not leases["resiliency-supervisor"]["spec"]["holderIdentity"], "it was given back"

    run(work)
