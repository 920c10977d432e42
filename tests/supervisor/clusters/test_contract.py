"""What the Kubernetes backend does with an API server: a fake one, and a real one where this machine has one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from resiliency.supervisor.clusters.base import HostFacts, Identity
from resiliency.supervisor.clusters.kubernetes import KubernetesCluster
from resiliency.supervisor.clusters.kubernetes.api import KubernetesApi
from resiliency.supervisor.clusters.kubernetes.facts import FAILED, UNTIL
from resiliency.supervisor.model import RemedyKind

from ..fake_monitors import until
from .fake_api import FakeApi
from .servers import AUDIENCE, FakeServer, RealServer, Server

pytestmark = pytest.mark.usefixtures("in_a_hurry")


@pytest.fixture(params=["fake", "real"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Server:
    if request.param == "fake":
        api: FakeApi = request.getfixturevalue("fake_api")
        return FakeServer(api)
    return RealServer(request.getfixturevalue("rig"), tmp_path)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


class Watched(KubernetesCluster):
    """One that runs. Attributes: facts: the newest of each host; gone: hosts that are no more."""

    def __init__(self, server: Server, **values: Any) -> None:
        given = {"audience": AUDIENCE, "lease": "supervisor", "block_label": "block", "quarantine_s": 1000.0, **values}
        super().__init__(KubernetesApi(server.access), namespace=server.jobs, **given)
        self.facts: dict[str, HostFacts] = {}
        self.gone: list[str] = []

    def jobset_of(self, name: str) -> str:
        """Its uid, as far as is known here; "" when there is none."""
        found = self._jobset(name)
        return "" if found is None else found.uid

    def hear(self, facts: HostFacts) -> None:
        if facts.is_gone:
            del self.facts[facts.host]
            self.gone.append(facts.host)
        else:
            self.facts[facts.host] = facts


@contextlib.asynccontextmanager
async def watched(server: Server, **values: Any) -> AsyncIterator[Watched]:
    made = Watched(server, **values)
    running = asyncio.create_task(made.run(made.hear))
    try:
        yield made
        assert not running.done(), running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.close()


def taints(server: Server, node: str) -> list[str]:
    return [each["key"] for each in server.node(node)["spec"].get("taints") or ()]


def is_cordoned(server: Server, node: str) -> bool:
    return bool(server.node(node)["spec"].get("unschedulable"))


def annotations(server: Server, node: str) -> dict[str, str]:
    return {key: value for key, value in (server.node(node)["metadata"].get("annotations") or {}).items() if key.startswith("resiliency/")}  # fmt: skip


def is_out(server: Server, node: str) -> bool:
    return is_cordoned(server, node) and FAILED in taints(server, node)


# -- what the cluster says ---------------------------------------------------------------------------------------------


def test_hosts_are_pods_on_nodes_from_the_first_to_the_last_that_is_said_of_them(server: Server) -> None:
    async def work() -> None:
        async with server:
            one, other = server.add_node("n-1", block="b-1"), server.add_node("n-2", block="b-2")
            server.add_pod("a", one)
            async with watched(server) as cluster:
                await until(
                    lambda: (
                        cluster.facts.get("a")
                        == HostFacts(host="a", node=one, block="b-1", job="train", job_name="train")
                    )
                )
                server.add_pod("b", other)
                await until(
                    lambda: (
                        cluster.facts.get("b")
                        == HostFacts(host="b", node=other, block="b-2", job="train", job_name="train")
                    )
                )
                server.change_node(other, {"spec": {"unschedulable": True}})
                await until(lambda: cluster.facts["b"].unwanted == f"node {other} is cordoned")
                assert not cluster.facts["a"].unwanted
                server.change_node(other, {"spec": {"unschedulable": None}})
                await until(lambda: not cluster.facts["b"].unwanted)
                leaving = {"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}
                server.change_node(one, {"spec": {"taints": [leaving]}})
                await until(lambda: "will be taken away" in cluster.facts["a"].unwanted)
                server.delete_pod("b", at_once=False)
                await until(lambda: cluster.facts["b"].unwanted == "pod b is being deleted")
                server.delete_pod("b")
                await until(lambda: cluster.gone == ["b"])
                assert list(cluster.facts) == ["a"]

    run(work)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_is_no_host_any_more_and_its_node_is_left_alone(server: Server, phase: str) -> None:
    """Its object stays, of a completed job for days, and nobody is heard of from there."""

    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts)
                server.end_pod("a", phase)
                await until(lambda: cluster.gone == ["a"])
                assert await cluster.take_out("a", "not heard of", is_dead=True) == ""
            async with watched(server) as cluster:
                server.add_pod("b", node)
                await until(lambda: "b" in cluster.facts)
                assert "a" not in cluster.facts and await cluster.take_out("a", "not heard of", is_dead=True) == ""
            assert server.pods() == {"a", "b"} and server.writes() == []

    run(work)


# -- a lost host -------------------------------------------------------------------------------------------------------


def test_a_lost_host_takes_two_writes_and_a_second_time_none(server: Server) -> None:
    async def work() -> None:
        async with server:
            node, spared = server.add_node("n"), server.add_node("spared")
            server.add_pod("a", node)
            server.add_pod("b", spared)
            async with watched(server) as cluster:
                await until(lambda: cluster.facts.keys() == {"a", "b"})
                began = datetime.now(timezone.utc)
                assert await cluster.take_out("a", "it is silent", is_dead=True) == ""
                assert server.writes(2) == [("PATCH", f"nodes/{node}", 200), ("DELETE", "pods/a", 200)]
                assert is_out(server, node) and server.pods() == {"b"} and not is_out(server, spared)
                said = annotations(server, node)
                end = datetime.strptime(said[UNTIL], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
                assert 998 < (end - began).total_seconds() < 1030 and said["resiliency/reason"] == "it is silent"
                await until(lambda: cluster.gone == ["a"])
                assert await cluster.take_out("a", "it is silent", is_dead=True) == ""
                assert await cluster.take_out("never-seen", "it is silent", is_dead=True) == ""
                assert len(server.writes()) == 2

    run(work)


def test_the_second_pod_of_a_node_makes_its_quarantine_no_longer(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            server.add_pod("b", node)
            async with watched(server) as cluster:
                await until(lambda: cluster.facts.keys() == {"a", "b"})
                assert await cluster.take_out("a", "first", is_dead=True) == ""
                said = annotations(server, node)
                assert await cluster.take_out("b", "second", is_dead=True) == "" and annotations(server, node) == said
                assert said["resiliency/falls"] == "1" and server.pods() == set() and is_out(server, node)

    run(work)


def test_a_newer_pod_of_the_same_name_is_never_deleted(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            made = Watched(server)
            running = asyncio.create_task(made.run(made.hear))
            await until(lambda: "a" in made.facts)
            running.cancel()  # from here on it does not learn of anything
            await asyncio.gather(running, return_exceptions=True)
            server.delete_pod("a")
            server.add_pod("a", node)
            assert await made.take_out("a", "it is silent", is_dead=True) == ""
            assert server.writes() == [] and server.pods() == {"a"}
            await made.close()

    run(work)


def test_a_node_that_is_gone_is_no_problem(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts)
                server.remove_node(node)
                assert await cluster.take_out("a", "it is silent", is_dead=True) == ""
                assert server.pods() == set()

    run(work)


@pytest.mark.parametrize("cordoned", [False, True])
def test_a_pod_that_somebody_else_deletes_is_given_its_grace_and_its_node_is_left_alone(
    server: Server, cordoned: bool
) -> None:
    """With a cordon it is `kubectl drain`. A node that is not ready has no kubelet that would end the pod."""

    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            async with watched(server) as cluster:
                if cordoned:
                    server.change_node(node, {"spec": {"unschedulable": True}})
                    await until(lambda: "a" in cluster.facts and cluster.facts["a"].unwanted)
                server.delete_pod("a", at_once=False)
                expected = f"node {node} is cordoned" if cordoned else "pod a is being deleted"
                await until(lambda: "a" in cluster.facts and cluster.facts["a"].unwanted == expected)
                await asyncio.sleep(0.2 if cordoned else 0)  # the deletion changes none of the facts
                assert await cluster.take_out("a", "drained", is_dead=True) == ""
                assert server.writes() == [] and server.pods() == {"a"}
                assert not cluster.facts["a"].is_down
                server.set_ready(node, False)
                await until(lambda: cluster.facts["a"].is_down)

                async def taken_out() -> bool:
                    assert await cluster.take_out("a", "drained", is_dead=True) == ""
                    return server.pods() == set()

                while not await taken_out():
                    await asyncio.sleep(0.01)
                assert is_out(server, node)

    run(work)


def test_the_pod_of_a_host_that_lives_has_its_grace_and_is_not_asked_to_go_again(server: Server) -> None:
    """In which its checkpoints are uploaded. It has none when its node is lost."""

    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts)
                assert await cluster.take_out("a", "drained", is_dead=False) == ""
                await until(lambda: "was taken out: drained" in cluster.facts["a"].unwanted)
                assert await cluster.take_out("a", "drained", is_dead=False) == ""
                assert server.pods() == {"a"} and is_out(server, node) and len(server.writes(2)) == 2
                server.set_ready(node, False)
                while server.pods():
                    assert await cluster.take_out("a", "drained", is_dead=False) == ""
                    await asyncio.sleep(0.01)

    run(work)


def test_a_dry_run_writes_nothing(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            server.add_job("job")
            async with watched(server, dry_run=True) as cluster:
                await until(lambda: "a" in cluster.facts)
                assert (
                    await cluster.take_out("a", "lost", is_dead=True) == "" == await cluster.give_up("train", "no more")
                )
            assert server.writes() == [] and server.pods() == {"a"}

    run(work)


# -- quarantine --------------------------------------------------------------------------------------------------------


def end_quarantine(server: Server, node: str) -> None:
    server.change_node(node, {"metadata": {"annotations": {UNTIL: "2020-01-01T00:00:00Z"}}})


def test_a_node_comes_back_after_its_quarantine_once_it_works(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts)
                assert await cluster.take_out("a", "lost", is_dead=True) == ""
                server.set_ready(node, False)
                server.add_pod("b", node)
                await until(lambda: "b" in cluster.facts and "was taken out: lost" in cluster.facts["b"].unwanted)
                end_quarantine(server, node)
                await asyncio.sleep(0.3)
                assert is_out(server, node)
                server.set_ready(node, True)
                await until(lambda: not is_cordoned(server, node))
                await until(lambda: not cluster.facts["b"].unwanted)
                assert FAILED not in taints(server, node)
                assert annotations(server, node).keys() == {UNTIL, "resiliency/falls"}
                patches = [write for write in server.writes(3) if write[:2] == ("PATCH", f"nodes/{node}")]
                assert len(patches) == 2

    run(work)


def test_a_cordon_and_taints_that_others_have_made_stay(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            theirs = {"key": "theirs", "value": "x", "effect": "PreferNoSchedule"}
            server.change_node(node, {"spec": {"unschedulable": True, "taints": [theirs]}})
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts)
                assert await cluster.take_out("a", "lost", is_dead=True) == ""
                assert is_out(server, node) and "theirs" in taints(server, node)
                end_quarantine(server, node)
                await until(lambda: FAILED not in taints(server, node))
                assert is_cordoned(server, node) and "theirs" in taints(server, node)

    run(work)


def test_who_removes_the_taint_has_given_the_node_back(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts)
                assert await cluster.take_out("a", "lost", is_dead=True) == ""
                server.change_node(node, {"spec": {"unschedulable": None, "taints": None}})
                server.add_pod("b", node)
                await until(lambda: "b" in cluster.facts and not cluster.facts["b"].unwanted)
                end_quarantine(server, node)
                await asyncio.sleep(0.3)
                assert len(server.writes(2)) == 2

    run(work)


# -- who is who --------------------------------------------------------------------------------------------------------


def test_a_token_says_which_pod_of_which_node_somebody_is(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            server.add_pod("watchdog", node, namespace=server.own)
            async with watched(server) as cluster:
                assert await cluster.identify(server.token("a")) == Identity(host="a", node=node)
                watchdog = server.token("watchdog", namespace=server.own)
                assert await cluster.identify(watchdog) == Identity(host=node, node=node, watches_node=True)

    run(work)


def test_no_other_token_lets_anybody_in(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_pod("a", node)
            server.add_pod("elsewhere", node, namespace="default")
            try:
                async with watched(server) as cluster:
                    good = server.token("a")
                    head, _, signature = good.rpartition(".")
                    forged = f"{head}.{signature[::-1]}"
                    wrong = server.token("a", audience="https://kubernetes.default.svc")
                    for token in (forged, wrong, "x", server.token("elsewhere", namespace="default")):
                        assert await cluster.identify(token) is None, token
                    assert await cluster.identify(good) is not None
            finally:
                if isinstance(server, RealServer):
                    server.delete_pod("elsewhere", namespace="default")

    run(work)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_job_that_is_given_up_fails(server: Server) -> None:
    async def work() -> None:
        async with server:
            node = server.add_node("n")
            server.add_job("job")
            server.add_pod("a", node)
            server.add_pod("b", node, job="never-made")
            server.add_jobset("train")
            async with watched(server) as cluster:
                await until(lambda: cluster.facts.keys() == {"a", "b"} and cluster.facts["b"].ended == "")
                for _ in range(2):
                    assert await cluster.give_up("train", "its policy has given up") == ""
                assert server.events() == [("GivenUp", "its policy has given up")]
                job = server.job("job")
                assert job["spec"]["activeDeadlineSeconds"] == 1
                assert job["metadata"]["annotations"]["resiliency/given-up"] == "its policy has given up"
                server.delete_pod("a")
                await until(lambda: "a" not in cluster.facts)
                assert await cluster.give_up("train", "gone already") == "" == await cluster.give_up("other", "nobody")
                patched = [(name, code) for verb, name, code in server.writes(5) if verb == "PATCH"]
                assert patched == [("jobs/job", 200), ("jobs/job", 200), ("jobs/never-made", 404)]

    run(work)


def test_what_is_kept_with_a_job_is_told_with_its_hosts_and_not_kept_with_the_next_one(server: Server) -> None:
    async def work() -> None:
        async with server:
            server.add_pod("a", server.add_node("n"))
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts and cluster.facts["a"].ended is None)
                first = server.add_jobset("train")
                await until(lambda: cluster.facts["a"].ended == "")
                assert await cluster.keep(first, "stopped") == ""
                await until(lambda: cluster.facts["a"].ended == "stopped")
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts and cluster.facts["a"].ended == "stopped")
                assert await cluster.keep(first, "") == ""
                await until(lambda: cluster.facts["a"].ended == "")
                assert "resiliency/ended" not in (server.jobset("train")["metadata"].get("annotations") or {})
                server.add_jobset("train")
                assert await cluster.keep(first, "stopped") == "" == await cluster.keep("unknown", "stopped")
                assert "resiliency/ended" not in (server.jobset("train")["metadata"].get("annotations") or {})

    run(work)


def test_a_job_wants_hosts_while_it_exists_and_is_not_suspended(server: Server) -> None:
    async def work() -> None:
        async with server:
            server.add_pod("a", server.add_node("n"))
            async with watched(server) as cluster:
                job = server.add_jobset("train")
                await until(lambda: "a" in cluster.facts and cluster.facts["a"].job_created)
                assert cluster.facts["a"].job_created == server.jobset("train")["metadata"]["creationTimestamp"]
                assert not cluster.wants_hosts(job) and not cluster.wants_hosts("train")
                server.change_jobset("train", {"spec": {"suspend": False}})
                await until(lambda: cluster.wants_hosts(job) and cluster.wants_hosts("train"))
                assert not cluster.wants_hosts("another")
                server.add_jobset("train")
                await until(lambda: not cluster.wants_hosts(job))

    run(work)


# -- last resorts ------------------------------------------------------------------------------------------------------


def test_all_pods_of_a_job_are_made_anew_those_that_live_with_their_grace(server: Server) -> None:
    async def work() -> None:
        async with server:
            node, dead = server.add_node("n"), server.add_node("dead")
            for name, at in ("a", node), ("b", dead):
                server.add_pod(name, at)
            job = server.add_jobset("train")
            async with watched(server) as cluster:
                await until(lambda: cluster.facts.keys() == {"a", "b"} and cluster.facts["b"].ended == "")
                assert RemedyKind.RENEW_HOSTS in await until(lambda: cluster.can)
                server.set_ready(dead, False)
                assert (
                    await cluster.renew("unknown", whole=False, reason="nothing helps") == "there is no JobSet unknown"
                )
                while server.pods() != {"a"}:
                    assert await cluster.renew("train", whole=False, reason="nothing helps") == ""
                    await asyncio.sleep(0.01)
                await until(lambda: cluster.facts["a"].unwanted == "pod a is being deleted")
                assert not is_cordoned(server, node) and server.jobset("train")["metadata"]["uid"] == job

    run(work)


@pytest.mark.parametrize("leader", ["lives", "dies"])
def test_a_jobset_is_made_anew_once_from_its_own_specification(server: Server, leader: str) -> None:
    """By the next leader when this one dies in between."""

    async def work() -> None:
        async with server:
            server.add_lease("supervisor")
            server.add_pod("a", server.add_node("n"))
            first = server.add_jobset("train")
            before = server.jobset("train")
            async with watched(server) as cluster:
                await until(lambda: "a" in cluster.facts and cluster.facts["a"].ended == "")
                assert RemedyKind.RENEW_JOB in await until(lambda: cluster.can)
                assert await cluster.renew("train", whole=True, reason="nothing helps") == ""
                if leader == "lives":
                    await renewed(server, cluster, first)
            if leader == "dies":
                async with watched(server) as cluster:
                    await renewed(server, cluster, first)
            after = server.jobset("train")
            assert after["spec"] == before["spec"] and after["metadata"]["labels"]["x"] == "y"
            assert after["metadata"]["annotations"]["resiliency/renewed"] == "nothing helps"
            async with watched(server) as cluster:
                await until(lambda: cluster.jobset_of("train") == after["metadata"]["uid"])
                assert "it was made anew before: nothing helps" in await cluster.renew("train", whole=True, reason="x")
                await asyncio.sleep(0.3)
            assert server.jobset("train")["metadata"]["uid"] == after["metadata"]["uid"]

    run(work)


async def renewed(server: Server, cluster: Watched, before: str) -> None:
    server.finish_deletion("train")
    # A garbage collector that has just been started learns of JobSets after half a minute.
    await until(lambda: cluster.jobset_of("train") not in ("", before), within_s=50)
