"""What the client makes of an API server that is away, busy, slow, forgetful or wrong."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.supervisor.clusters.base import ClusterUnavailable, Identity
from resiliency.supervisor.clusters.kubernetes import KubernetesCluster
from resiliency.supervisor.clusters.kubernetes import api as api_module
from resiliency.supervisor.clusters.kubernetes import cluster as cluster_module
from resiliency.supervisor.clusters.kubernetes.api import Access, ApiError, ApiUnavailable, KubernetesApi
from resiliency.supervisor.clusters.kubernetes.facts import UNTIL

from ..fake_monitors import until
from .fake_api import NODES, Drop, FakeApi, Fault, Refuse, Silence
from .servers import AUDIENCE, FakeServer

pytestmark = pytest.mark.usefixtures("in_a_hurry")

THINGS = "/api/v1/nodes"


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def thing(name: str, value: int = 0) -> dict[str, Any]:
    return {"metadata": {"name": name}, "value": value}


class Hurried:
    """Of asyncio, in which pauses take no time. Attributes: pauses: how long they should have taken, in seconds."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)


class Follower:
    """Follows what a fake API server has, and finds anything in it that was never there.

    Attributes: known: names and values by uid.
    """

    def __init__(self, fake: FakeApi) -> None:
        self.fake, self.known = fake, dict[str, tuple[str, int]]()
        self.api = KubernetesApi(fake.access)
        self.invented: list[object] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Follower:
        work = self.api.follow(THINGS, lambda item: (item["metadata"]["name"], item.get("value", 0)), self._changed)
        self._task = asyncio.create_task(work)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        was_done = self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.api.close()
        assert not was_done and self.invented == []

    def _changed(self, uid: str, value: tuple[str, int] | None) -> None:
        if value is None:
            name, _ = self.known.pop(uid)
            if uid in self.there():
                self.invented.append(f"the end of {name}")
        else:
            if self.known.get(uid) == value:
                self.invented.append(f"a change of {value}")
            self.known[uid] = value

    def there(self) -> dict[str, tuple[str, int]]:
        items = self.fake.objects.get(THINGS, {}).values()
        return {each["metadata"]["uid"]: (each["metadata"]["name"], each.get("value", 0)) for each in items}

    async def is_up_to_date(self) -> None:
        await until(lambda: self.known == self.there())


def _busy(fake: FakeApi) -> None:
    fake.fail(Refuse(429, retry_after="0"), lambda verb, path: True, times=3)
    fake.cut_watches()


def _fails(fake: FakeApi) -> None:
    for status in (500, 503, 504):
        fake.fail(Refuse(status))
    fake.end_watches()


def _drops(fake: FakeApi) -> None:
    fake.fail(Drop(), times=3)
    fake.cut_watches()


def _forgets(fake: FakeApi) -> None:
    fake.forget()
    fake.cut_watches()


def _forgets_with_status(fake: FakeApi) -> None:
    fake.gone_as_status = True
    _forgets(fake)


def _forgets_pages(fake: FakeApi) -> None:
    fake.most_items = 2
    pages = iter([None, fake.forget])  # between the first page and the second

    def between() -> None:
        if (then := next(pages, None)) is not None:
            then()

    fake.meanwhile("GET", between)
    fake.meanwhile("GET", between)
    _forgets(fake)


def _forbids(fake: FakeApi) -> None:
    fake.fail(Refuse(403), times=2)
    _forgets(fake)


def _forbids_watches(fake: FakeApi) -> None:
    fake.fail(Refuse(403), lambda verb, path: verb == "WATCH", times=2)
    fake.end_watches()


def _ends_with_410(fake: FakeApi) -> None:
    fake.watch_error(410)


def _ends_with_500(fake: FakeApi) -> None:
    fake.watch_error(500)


def _cuts(fake: FakeApi) -> None:
    fake.cut_watches()


def _cuts_lines(fake: FakeApi) -> None:
    fake.cut_watches(within_a_line=True)


def _ends(fake: FakeApi) -> None:
    fake.end_watches()


def _bookmarks(fake: FakeApi) -> None:
    fake.bookmark()
    fake.cut_watches()


MISBEHAVIOURS = [
    _busy, _fails, _drops, _forgets, _forgets_with_status, _forgets_pages, _forbids, _forbids_watches,
    _ends_with_410, _ends_with_500, _cuts, _cuts_lines, _ends, _bookmarks,
]  # fmt: skip


@pytest.mark.parametrize("misbehave", MISBEHAVIOURS)
def test_nothing_is_missed_and_nothing_invented(fake_api: FakeApi, misbehave: Callable[[FakeApi], None]) -> None:
    """Before, while and after the server misbehaves something is made, changed and removed."""

    async def work() -> None:
        async with fake_api as fake:
            for number in range(5):
                fake.put(THINGS, thing(f"old-{number}"))
            async with Follower(fake) as follower:
                await follower.is_up_to_date()
                await until(lambda: fake.watches == [THINGS])
                fake.change(THINGS, "old-0", {"value": 1})
                misbehave(fake)
                fake.put(THINGS, thing("new"))
                fake.change(THINGS, "old-1", {"value": 2})
                fake.remove(THINGS, "old-2")
                fake.remove(THINGS, "old-3")
                fake.put(THINGS, thing("old-3", 3))
                await follower.is_up_to_date()
                fake.remove(THINGS, "new")
                await follower.is_up_to_date()

    run(work)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    acts=st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abcdef"), st.sampled_from(["put", "remove"]), st.integers(0, 3)),
            st.sampled_from(MISBEHAVIOURS),
            st.sampled_from([0.0, 0.002, 0.02]),
        ),
        max_size=25,
    ),
    page=st.sampled_from([1, 2, 500]),
)
def test_whatever_happens_in_the_end_all_is_known(certificates: Any, acts: list[Any], page: int) -> None:
    async def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with FakeApi(*certificates, Path(folder)) as fake:
                fake.most_items = page
                async with Follower(fake) as follower:
                    for act in acts:
                        if isinstance(act, float):
                            await asyncio.sleep(act)
                        elif callable(act):
                            act(fake)
                        elif act[1] == "put":
                            fake.put(THINGS, thing(act[0], act[2]))
                        elif act[0] in fake.objects.get(THINGS, {}):
                            fake.remove(THINGS, act[0])
                    await follower.is_up_to_date()

    run(work)


def test_a_watch_goes_on_where_it_was_and_from_bookmarks(fake_api: FakeApi) -> None:
    """The whole list is not read again where that is not needed: of other objects' changes nothing may have come for
    hours."""

    async def work() -> None:
        async with fake_api as fake, Follower(fake) as follower:
            await until(lambda: fake.watches)
            fake.bookmark()
            fake.put(THINGS, thing("b"))
            await follower.is_up_to_date()
            fake.forget()
            fake.bookmark()
            fake.end_watches()
            await until(lambda: [verb for verb, _ in fake.asked].count("WATCH") == 2 and fake.watches)
            fake.put(THINGS, thing("d"))
            await follower.is_up_to_date()
            assert [verb for verb, _ in fake.asked].count("GET") == 1

    run(work)


def test_a_watch_that_falls_silent_is_made_anew(fake_api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_SILENT_S", 0.1)

    async def work() -> None:
        async with fake_api as fake:
            fake.fail(Silence(), lambda verb, path: verb == "WATCH")
            async with Follower(fake) as follower:
                await until(lambda: ("WATCH", THINGS) in fake.asked)
                fake.put(THINGS, thing("a"))
                await follower.is_up_to_date()

    run(work)


@pytest.mark.parametrize("fault", [Refuse(403), Refuse(429), Drop()])
def test_a_watch_that_is_refused_again_and_again_is_asked_for_less_and_less_often(
    fake_api: FakeApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    monkeypatch.setattr(api_module, "_LONGEST_PAUSE_S", 1000.0)
    hurried = Hurried()
    monkeypatch.setattr(api_module, "asyncio", hurried)

    async def work() -> None:
        async with fake_api as fake:
            fake.fail(fault, lambda verb, path: verb == "WATCH", times=6)
            async with Follower(fake):
                await until(lambda: fake.watches)
            assert [verb for verb, _ in fake.asked] == ["GET", *["WATCH"] * 7]

    run(work)
    # On a connection that was used before and is dropped, aiohttp asks once more by itself.
    assert len(hurried.pauses) == (3 if isinstance(fault, Drop) else 6) and hurried.pauses[-1] > 2 * hurried.pauses[0]
    said = [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert len(said) == (0 if isinstance(fault, Drop) else 2) and all(THINGS in line for line in said)


def test_a_token_that_has_expired_is_replaced_by_the_one_that_is_in_the_file_then(
    fake_api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with fake_api as fake, Follower(fake) as follower:
            await follower.is_up_to_date()
            await until(lambda: fake.watches)
            fake.replace_token("second", on_disk=False)
            with pytest.raises(ApiError, match="401") as refused:
                await follower.api.request("GET", THINGS)
            assert refused.value.status == 401 and not isinstance(refused.value, ApiUnavailable)
            fake.put(THINGS, thing("a"))
            _forgets(fake)
            await until(lambda: "cannot be followed" in caplog.text)
            fake.replace_token("second")
            fake.put(THINGS, thing("b"))
            await follower.is_up_to_date()
            assert await follower.api.request("GET", THINGS)

    caplog.set_level("WARNING")
    run(work)
    assert caplog.messages[-1] == f"{THINGS} is followed again"


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Refuse(429, retry_after="0"), Refuse(500), Refuse(503), Drop(), Drop(done=True)])
def test_a_request_is_repeated_while_the_server_is_busy_or_away(fake_api: FakeApi, fault: Fault) -> None:
    async def work() -> None:
        async with fake_api as fake:
            api = KubernetesApi(fake.access)
            made = fake.put(NODES, thing("n"))
            fake.fail(fault, times=2)
            body = {"value": 7, "metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}}
            change = api.request("PATCH", f"{NODES}/n", body, kind="application/merge-patch+json")
            if fault == Drop(done=True):  # what was done already is not done twice
                with pytest.raises(ApiError, match="409"):
                    await change
            else:
                assert (await change)["value"] == 7
            assert fake.objects[NODES]["n"]["value"] == 7
            await api.close()

    run(work)


def test_a_busy_server_is_left_alone_for_as_long_as_it_says(fake_api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    hurried = Hurried()
    monkeypatch.setattr(api_module, "asyncio", hurried)
    monkeypatch.setattr(api_module, "_LONGEST_PAUSE_S", 10.0)

    async def work() -> None:
        async with fake_api as fake:
            api = KubernetesApi(fake.access)
            fake.fail(Refuse(429, retry_after="3"))
            await api.request("GET", NODES)
            await api.close()

    run(work)
    assert len(hurried.pauses) == 1 and hurried.pauses[0] > 2


@pytest.mark.parametrize("fault", [Silence(), Drop(), Refuse(429, retry_after="100"), Refuse(500)])
def test_a_request_is_given_up_in_time(fake_api: FakeApi, fault: Fault) -> None:
    async def work() -> None:
        async with fake_api as fake:
            api = KubernetesApi(fake.access)
            fake.fail(fault, times=1000)
            with pytest.raises(ApiUnavailable, match=f"GET {NODES}.*tried for"):
                await api.request("GET", NODES, give_up_s=0.2)
            await api.close()

    run(work)


def test_a_refused_right_is_said_with_what_was_asked_for(fake_api: FakeApi) -> None:
    async def work() -> None:
        async with fake_api as fake:
            api = KubernetesApi(fake.access)
            fake.fail(Refuse(403))
            with pytest.raises(ApiError, match=f"PATCH {NODES}/n: 403: told to") as refused:
                await api.request("PATCH", f"{NODES}/n", {})
            assert refused.value.status == 403
            await api.close()

    run(work)


def test_access_that_cannot_work_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="`server`, `token_file`, `ca_file` and `namespace`"):
        Access.of_pod()
    given = {
        "server": "https://a/",
        "namespace": "n",
        "token_file": str(tmp_path / "t"),
        "ca_file": str(tmp_path / "c"),
    }
    for name in ("t", "c"):
        with pytest.raises(ConfigError, match=f"{tmp_path}/{name}: No such file.*automountServiceAccountToken"):
            Access.of_pod(**given)
        (tmp_path / name).touch()
    assert Access.of_pod(**given) == Access(**{**given, "server": "https://a"})
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert Access.of_pod(**{**given, "server": ""}).server == "https://[fd00::1]:443"


# -- what the backend does while the server is away --------------------------------------------------------------------


def cluster_of(server: FakeServer) -> KubernetesCluster:
    api = KubernetesApi(server.access)
    return KubernetesCluster(
        api, namespace="jobs", audience=AUDIENCE, lease="supervisor", block_label="block", quarantine_s=1000.0
    )


async def with_cluster(fake: FakeApi, do: Callable[[FakeServer, KubernetesCluster], Awaitable[None]]) -> None:
    """With a pod ``a`` on a node ``n``."""
    server = FakeServer(fake)
    async with server:
        server.add_node("n")
        server.add_pod("a", "n")
        cluster = cluster_of(server)
        known: list[object] = []
        running = asyncio.create_task(cluster.run(known.append))
        await until(lambda: known)
        try:
            await do(server, cluster)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await cluster.close()


def test_a_node_that_changes_meanwhile_is_taken_out_all_the_same(fake_api: FakeApi) -> None:
    async def do(server: FakeServer, cluster: KubernetesCluster) -> None:
        for number in range(3):
            fake_api.meanwhile("PATCH", lambda number=number: server.change_node("n", {"metadata": {"labels": {"x": str(number)}}}))  # type: ignore[misc]  # fmt: skip
        assert await cluster.take_out("a", "lost", is_dead=True) == ""
        assert [code for _, _, code in server.writes()] == [409, 409, 409, 200, 200]
        assert server.node("n")["metadata"]["labels"]["x"] == "2"

    run(lambda: with_cluster(fake_api, do))


def test_a_node_that_changes_all_the_time_is_a_problem_and_no_endless_one(fake_api: FakeApi) -> None:
    async def do(server: FakeServer, cluster: KubernetesCluster) -> None:
        for number in range(100):
            fake_api.meanwhile("PATCH", lambda number=number: server.change_node("n", {"metadata": {"labels": {"x": str(number)}}}))  # type: ignore[misc]  # fmt: skip
        assert "409" in await cluster.take_out("a", "lost", is_dead=True) and server.pods() == {"a"}

    run(lambda: with_cluster(fake_api, do))


def test_a_host_whose_pod_could_not_be_deleted_is_taken_out_again_and_its_quarantine_stays(fake_api: FakeApi) -> None:
    async def do(server: FakeServer, cluster: KubernetesCluster) -> None:
        fake_api.fail(Refuse(403), lambda verb, path: verb == "DELETE")
        assert "DELETE" in await cluster.take_out("a", "lost", is_dead=True) and server.pods() == {"a"}
        said = server.node("n")["metadata"]["annotations"]
        assert await cluster.take_out("a", "lost", is_dead=True) == "" and server.pods() == set()
        assert server.node("n")["metadata"]["annotations"] == said

    run(lambda: with_cluster(fake_api, do))


def test_a_node_that_fails_again_as_it_is_about_to_come_back_stays_out(fake_api: FakeApi) -> None:
    async def do(server: FakeServer, cluster: KubernetesCluster) -> None:
        assert await cluster.take_out("a", "lost", is_dead=True) == ""
        again = {"metadata": {"annotations": {UNTIL: "2199-01-01T00:00:00Z"}}}
        handled = []

        def fails_again() -> None:
            server.change_node("n", again)
            handled.append(1)

        fake_api.fail(Silence(), lambda verb, path: verb == "WATCH", times=100)  # it learns nothing of it
        server.change_node("n", {"metadata": {"annotations": {UNTIL: "2020-01-01T00:00:00Z"}}})
        fake_api.meanwhile("GET", fails_again)
        await until(lambda: handled)
        await asyncio.sleep(0.3)
        assert server.node("n")["spec"]["unschedulable"] and len(server.writes()) == 2

    run(lambda: with_cluster(fake_api, do))


def test_while_the_server_is_away_a_host_is_who_it_was_as_long_as_its_pod_is_known(
    fake_api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_REVIEW_S", 0.05)

    async def do(server: FakeServer, cluster: KubernetesCluster) -> None:
        server.add_pod("b", "n")
        a, b = server.token("a"), server.token("b")
        assert await cluster.identify(a) is not None
        newer = f"{a}-renewed"
        fake_api.reviews[newer] = fake_api.reviews[a]
        assert await cluster.identify(newer) is not None

        def away(verb: str, path: str) -> bool:
            return path.endswith("tokenreviews")

        of_ghost = {"pod-name": ["ghost"], "node-name": ["n"]}
        extra = {f"authentication.kubernetes.io/{key}": value for key, value in of_ghost.items()}
        user = {"username": "system:serviceaccount:jobs:default", "extra": extra}
        fake_api.reviews["ghost"] = {"user": user, "audiences": [AUDIENCE]}
        assert await cluster.identify("ghost") is not None
        fake_api.fail(Refuse(503), away, times=10_000)
        assert (await cluster.identify(newer)) is not None
        # An older one of the same pod, one that was not reviewed, nobody's, and one of a pod that was not seen yet.
        for token in (a, b, "forged", "ghost"):
            with pytest.raises(ClusterUnavailable, match="503"):
                await cluster.identify(token)
        server.delete_pod("a")

        async def is_refused() -> bool:
            try:
                return await cluster.identify(newer) is None
            except ClusterUnavailable:
                return True

        while not await is_refused():
            await asyncio.sleep(0.01)

    run(lambda: with_cluster(fake_api, do))


def test_in_a_namespace_of_both_the_service_account_tells_watchdogs_from_hosts(fake_api: FakeApi) -> None:
    async def do(server: FakeServer, cluster: KubernetesCluster) -> None:
        api = KubernetesApi(server.access)
        shared = KubernetesCluster(
            api,
            namespace=server.own,
            audience=AUDIENCE,
            lease="",
            block_label="",
            quarantine_s=1.0,
            watchdog_account="supervisor-node",
        )
        server.add_pod("b", "n", namespace=server.own)
        watchdog = server.token("b", namespace=server.own, account="supervisor-node")
        assert await shared.identify(watchdog) == Identity(host="n", node="n", watches_node=True)
        assert await shared.identify(server.token("b", namespace=server.own)) == Identity(host="b", node="n")
        assert await shared.identify(server.token("a", account="supervisor-node")) is None, "of another namespace"
        await shared.close()

    run(lambda: with_cluster(fake_api, do))


def test_a_pod_whose_token_is_refused_once_is_not_let_in_from_memory(
    fake_api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a pod that was deleted by force while its node was cut off."""
    monkeypatch.setattr(cluster_module, "_REVIEW_S", 0.05)

    async def do(server: FakeServer, cluster: KubernetesCluster) -> None:
        token = server.token("a")
        assert await cluster.identify(token) is not None
        del fake_api.reviews[token]
        assert await cluster.identify(token) is None
        fake_api.fail(Drop(), lambda verb, path: path.endswith("tokenreviews"), times=10_000)
        with pytest.raises(ClusterUnavailable):
            await cluster.identify(token)

    run(lambda: with_cluster(fake_api, do))
