"""What a store that is busy, slow, broken or closed to us does to the tier: a proxy before the GCS emulator plays it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import TierError
from resiliency.storage.tiers import _source, object_store
from resiliency.storage.tiers.object_store import ObjectStoreTier
from resiliency.testing.gcs_server import FakeGcs, GcsFolder
from resiliency.testing.http_faults import FaultProxy, HttpFault

# Requests as the proxy sees them.
PUT = "^POST .*uploadType=multipart"
BEGIN = "^POST (?!.*upload_id=).*uploadType=resumable"
PART = "^POST .*upload_id="
CANCEL = "^DELETE .*upload_id="
COPY = "^POST .*/rewriteTo/"
GET = "^GET .*alt=media"
LIST = "^GET .*/o\\?"
DELETE = "^DELETE /storage"

#: Small blocks, so that three parts are little work.
BLOCK_BYTES = 512 * 1024

Make = Callable[..., ObjectStoreTier]


class Clock:
    """Time passes only in pauses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_source, object_store):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)


@pytest.fixture(scope="module")
def one_proxy(gcs: FakeGcs) -> Iterator[FaultProxy]:
    with FaultProxy(gcs.url) as made:
        yield made


@pytest.fixture
def proxy(one_proxy: FaultProxy) -> Iterator[FaultProxy]:
    yield one_proxy
    one_proxy.reset()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(bucket: GcsFolder, proxy: FaultProxy, clock: Clock) -> Iterator[Make]:
    """Tiers that reach the store through the proxy and never really pause."""
    made: list[ObjectStoreTier] = []

    def make(**options: Any) -> ObjectStoreTier:
        storage = {**bucket.server.storage_options, "endpoint_url": proxy.url}
        defaults = {"pause": clock.pause, "clock": lambda: clock.now, "part_bytes": BLOCK_BYTES}
        made.append(ObjectStoreTier(bucket.url, storage_options=storage, **{**defaults, **options}))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Two blocks and a bit: one session, three parts."""
    path = tmp_path / "big"
    path.write_bytes(b"a" * BLOCK_BYTES + b"b" * BLOCK_BYTES + b"c" * 1000)
    return path


def verbs(tier: ObjectStoreTier, big: Path) -> dict[str, tuple[str, Callable[[], object]]]:
    return {
        "put_bytes": (PUT, lambda: tier.put_bytes("new", b"data")),
        "put_file begin": (BEGIN, lambda: tier.put_file("new", str(big))),
        "put_file part": (PART, lambda: tier.put_file("new", str(big))),
        "alias": (COPY, lambda: tier.alias("old", "new")),
        "read": (GET, lambda: tier.read("old")),
        "read_range": (GET, lambda: tier.read_range("old", 1, 3)),
        "list": (LIST, lambda: [o.key for o in tier.list("")]),
        "delete": (DELETE, lambda: tier.delete("old")),
    }


VERBS = ["put_bytes", "put_file begin", "put_file part", "alias", "read", "read_range", "list", "delete"]


@pytest.mark.parametrize("verb", VERBS)
def test_passing_faults_are_sat_out(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, clock: Clock, tmp_path: Path, verb: str
) -> None:
    two_parts = tmp_path / "two parts"
    two_parts.write_bytes(b"x" * (BLOCK_BYTES + 5))
    tier = make()
    pattern, call = verbs(tier, two_parts)[verb]
    for fault in (503, 429, 502, HttpFault.RESET):
        bucket.put("old", b"0123")
        tier.delete("new")
        clock.pauses.clear()
        proxy.fail(pattern, fault, times=2, skip=1 if "part" in verb else 0)
        if verb == "list":
            assert "old" in call(), fault  # type: ignore[operator]
        else:
            assert call() == {"read": b"0123", "read_range": b"12"}.get(verb), fault
        if fault is not HttpFault.RESET or pattern in (PUT, BEGIN, PART, COPY):
            # The HTTP client itself repeats a GET or DELETE on a connection that proves dead.
            assert len(clock.pauses) == 2, fault
        if verb == "delete":
            assert bucket.keys() == set(), fault
        elif verb == "alias":
            assert bucket.get("new") == b"0123", fault
        elif "put" in verb:
            assert bucket.get("new") == (b"data" if verb == "put_bytes" else two_parts.read_bytes()), fault


@pytest.mark.parametrize("fault", [408, 500, 504, HttpFault.LOST_ANSWER], ids=str)
def test_a_put_outlasts_passing_faults(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, fault: HttpFault | int
) -> None:
    proxy.fail(PUT, fault, times=2)
    make().put_bytes("k", b"data")
    assert bucket.get("k") == b"data"
    assert len(proxy.seen(PUT)) == 3


@pytest.mark.parametrize("fault", [503, HttpFault.LOST_ANSWER, HttpFault.RESET], ids=str)
def test_a_copy_by_the_store_outlasts_passing_faults_and_moves_no_bytes_here(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path, fault: HttpFault | int
) -> None:
    bucket.put("old", big.read_bytes())
    proxy.fail(COPY, fault, times=2)
    make().alias("old", "new")
    assert bucket.get("new") == big.read_bytes()
    assert len(proxy.seen(COPY)) == 3
    assert proxy.seen(GET) == proxy.seen("upload") == []


def test_a_copy_that_takes_the_store_several_requests_is_carried_to_its_end(
    make: Make, proxy: FaultProxy, bucket: GcsFolder
) -> None:
    """As between storage classes: each answer has a token for the next request."""
    bucket.put("old", b"0123")
    proxy.fail(COPY, 200, times=2, body='{"done": false, "rewriteToken": "more"}')
    make().alias("old", "new")
    assert len(proxy.seen(COPY)) == 3 and len(proxy.seen("rewriteToken=more")) == 2
    assert bucket.get("new") == b"0123"


@pytest.mark.parametrize("verb", VERBS)
def test_a_store_that_stays_busy_ends_in_a_retryable_error(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path, verb: str
) -> None:
    bucket.put("old", b"0123")
    tier = make(attempts=3)
    pattern, call = verbs(tier, big)[verb]
    proxy.fail(pattern, 503, times=99)
    with pytest.raises(TierError, match="503") as caught:
        call()
    assert caught.value.retryable
    assert caught.value.__cause__ is not None
    assert len(proxy.seen(pattern)) == 3
    message = str(caught.value)
    assert bucket.url in message and "3 attempts" in message and "overloaded" in message
    assert bucket.keys() == {"old"}


@pytest.mark.parametrize("verb", ["put_bytes", "put_file begin", "alias", "read", "list", "delete"])
def test_lasting_faults_are_told_at_once(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path, verb: str
) -> None:
    bucket.put("old", b"0123")
    tier = make()
    pattern, call = verbs(tier, big)[verb]
    faults = {400: "see the message", 401: "credentials", 403: "permission", 404: "bucket does not exist"}
    if verb in ("read", "delete"):
        del faults[404]  # has another meaning for them
    elif verb == "alias":
        faults[404] = "no object 'old'"
    for status, advice in faults.items():
        proxy.reset()
        proxy.fail(pattern, status, times=99)
        with pytest.raises(TierError, match=advice) as caught:
            call()
        assert not caught.value.retryable, status
        assert len(proxy.seen(pattern)) == 1, status
        assert bucket.keys() == {"old"}, status


def test_pauses_double_and_are_drawn_from_the_upper_half(make: Make, proxy: FaultProxy, clock: Clock) -> None:
    proxy.fail(PUT, 503, times=99)
    with pytest.raises(TierError):
        make(attempts=8, backoff=timedelta(seconds=1)).put_bytes("k", b"x")
    limits = [1, 2, 4, 8, 16, 30, 30]
    assert len(clock.pauses) == len(limits)
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(clock.pauses, limits, strict=True))
    assert len({pause / limit for pause, limit in zip(clock.pauses, limits, strict=True)}) > 1


def test_the_deadline_ends_the_attempts(make: Make, proxy: FaultProxy, clock: Clock) -> None:
    proxy.fail(PUT, 503, times=9999)
    with pytest.raises(TierError) as caught:
        make(attempts=1000, retry_timeout=timedelta(seconds=100)).put_bytes("k", b"x")
    assert caught.value.retryable
    assert 60 < sum(clock.pauses) <= 100


def test_progress_renews_the_patience(
    make: Make, proxy: FaultProxy, clock: Clock, bucket: GcsFolder, big: Path
) -> None:
    """Each part may fail as often as the first: a long upload is not failed for the sum of its hiccups."""
    for part in range(3):
        proxy.fail(PART, 503, times=2, skip=part)
    make(attempts=3, retry_timeout=timedelta(seconds=4)).put_file("k", str(big))
    assert len(clock.pauses) == 6
    assert bucket.get("k") == big.read_bytes()


def test_a_verb_stops_when_the_process_is_told_to(make: Make, proxy: FaultProxy) -> None:
    stop = threading.Event()
    proxy.fail(PUT, 503, times=99)
    tier = make(pause=stop.wait, backoff=timedelta(minutes=5), retry_timeout=timedelta(hours=1))
    stop.set()
    with pytest.raises(TierError, match="stopped on request") as caught:
        tier.put_bytes("k", b"x")
    assert caught.value.retryable
    assert len(proxy.seen(PUT)) == 1


def test_a_store_that_does_not_answer_is_asked_again(make: Make, proxy: FaultProxy, bucket: GcsFolder) -> None:
    proxy.fail(PUT, HttpFault.HANG, times=2)
    make(request_timeout=timedelta(seconds=0.3)).put_bytes("k", b"data")
    assert bucket.get("k") == b"data"
    assert len(proxy.seen(PUT)) == 3


def test_a_store_that_never_answers_is_given_up(make: Make, proxy: FaultProxy) -> None:
    proxy.fail(GET, HttpFault.HANG, times=99)
    with pytest.raises(TierError, match="did not answer in time") as caught:
        make(request_timeout=timedelta(seconds=0.2), attempts=2).read("k")
    assert caught.value.retryable


def test_a_store_nobody_listens_at_is_unreachable(bucket: GcsFolder, clock: Clock) -> None:
    storage = {**bucket.server.storage_options, "endpoint_url": "http://127.0.0.1:9"}
    tier = ObjectStoreTier(bucket.url, storage_options=storage, pause=clock.pause, attempts=2)
    with pytest.raises(TierError, match="network of this host and the store's status page") as caught:
        tier.put_bytes("k", b"x")
    assert caught.value.retryable
    tier.close()


# ---- streamed uploads


def test_only_the_failed_part_is_sent_again(make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path) -> None:
    proxy.fail(PART, 503, times=1, skip=1)
    blocks: list[bytes] = []
    make().put_file("k", str(big), check=blocks.append)
    assert bucket.get("k") == big.read_bytes() == b"".join(blocks)
    assert len(proxy.seen(BEGIN)) == 1
    assert len(proxy.seen(PART)) == 3 + 1


def test_the_last_part_is_sent_again_too(make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path) -> None:
    proxy.fail(PART, 503, times=2, skip=2)
    make().put_file("k", str(big))
    assert bucket.get("k") == big.read_bytes()
    assert len(proxy.seen(PART)) == 3 + 2


@pytest.mark.parametrize("status", [404, 410])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_forgotten_session_is_retryable_and_stores_nothing(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path, part: int, status: int
) -> None:
    proxy.fail(PART, status, times=99, skip=part)
    with pytest.raises(TierError, match="put the file again") as caught:
        make().put_file("k", str(big))
    assert caught.value.retryable
    assert len(proxy.seen(PART)) == part + 1
    assert bucket.keys() == set()


def test_an_aborted_upload_is_cancelled_at_the_store(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path
) -> None:
    def refuse_last(block: bytes) -> None:
        if len(block) < BLOCK_BYTES:
            raise RuntimeError("bad digest")

    for answer in (None, 503):
        if answer is not None:
            proxy.fail(CANCEL, answer, times=99)
        with pytest.raises(RuntimeError, match="bad digest"):
            make().put_file("k", str(big), check=refuse_last)
    assert len(proxy.seen(CANCEL)) == 2
    assert bucket.keys() == set()


def test_bytes_spoilt_on_the_way_are_sent_again(make: Make, proxy: FaultProxy, bucket: GcsFolder) -> None:
    """The store answers with the digest of what it got."""
    proxy.fail(PUT, 200, body=json.dumps({"md5Hash": "bm90IHRoZSBkaWdlc3Q=", "generation": "1"}))
    make().put_bytes("k", b"data")
    assert bucket.get("k") == b"data"
    assert len(proxy.seen(PUT)) == 2


def test_an_upload_spoilt_on_the_way_is_removed(make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path) -> None:
    bucket.put("k", b"stands for the spoilt object, which is visible by now")
    proxy.fail(PART, 200, skip=2, body=json.dumps({"md5Hash": "bm90IHRoZSBkaWdlc3Q=", "generation": "1"}))
    with pytest.raises(TierError, match="put the file again") as caught:
        make().put_file("k", str(big))
    assert caught.value.retryable
    assert bucket.keys() == set()


# ---- 412: somebody was first


@pytest.mark.parametrize("there", [b"data", b"dat", b"datax", b"", None], ids=str)
def test_a_precondition_that_fails_on_small_data(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, there: bytes | None
) -> None:
    if there is not None:
        bucket.put("k", there)
    proxy.fail(PUT, 412, times=99)
    if there == b"data":
        make().put_bytes("k", b"data")
    else:
        with pytest.raises(TierError, match="somebody else wrote") as caught:
            make().put_bytes("k", b"data")
        assert not caught.value.retryable
    assert bucket.get("k") == there
    assert len(proxy.seen(PUT)) == 1


@pytest.mark.parametrize(
    ("where", "there"),
    [
        ("begin", "same"),
        ("begin", "longer"),
        ("begin", "shorter"),
        ("begin", "none"),
        ("last part", "same"),
        ("last part", "other"),
    ],
)
def test_a_precondition_that_fails_on_a_file(
    make: Make, proxy: FaultProxy, bucket: GcsFolder, big: Path, there: str, where: str
) -> None:
    data = big.read_bytes()
    content = {"same": data, "longer": data + b"x", "shorter": data[:-1], "other": data[:-1] + b"x"}.get(there)
    if content is not None:
        bucket.put("k", content)
    proxy.fail(BEGIN, 412) if where == "begin" else proxy.fail(PART, 412, skip=2)
    if there == "same":
        make().put_file("k", str(big))
    else:
        with pytest.raises(TierError, match="somebody else wrote") as caught:
            make().put_file("k", str(big))
        assert not caught.value.retryable
    assert bucket.get("k") == content
