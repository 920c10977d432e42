"""The doubles do what their scripts say, and nothing where there is no script: then they pass the tests of every tier."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import TierError
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.tier_doubles import Call, Fault, FaultyTier, RecordingTier, SlowTier, Verb
from resiliency.testing.tier_tests import TierTests


class TestDoublesWithoutScript(TierTests):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return RecordingTier(SlowTier(FaultyTier(LocalTier(tmp_path / "root", durable=False))))

    def raw_get(self, tier: Tier, key: str) -> bytes | None:
        path = Path(tier.root, key)
        return path.read_bytes() if path.is_file() else None

    def raw_put(self, tier: Tier, key: str, data: bytes) -> None:
        path = Path(tier.root, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_keys(self, tier: Tier) -> set[str]:
        return {p.relative_to(tier.root).as_posix() for p in Path(tier.root).rglob("*") if p.is_file()}


@pytest.fixture
def inner(tmp_path: Path) -> LocalTier:
    tier = LocalTier(tmp_path / "root", durable=False)
    tier.put_bytes("old", b"data")
    return tier


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "source"
    path.write_bytes(b"file")
    return str(path)


def verbs(tier: Tier, source: str) -> dict[str, Callable[[], Any]]:
    return {
        "put_bytes": lambda: tier.put_bytes("new", b"data"),
        "put_file": lambda: tier.put_file("new", source),
        "alias": lambda: tier.alias("old", "new"),
        "read": lambda: tier.read("old"),
        "read_range": lambda: tier.read_range("old", 0, 4),
        "list": lambda: [o.key for o in tier.list("")],
        "delete": lambda: tier.delete("old"),
    }


@pytest.mark.parametrize(
    ("fault", "retryable"), [(Fault.BUSY, True), (Fault.FULL, True), (Fault.REFUSED, False), (Fault.CONFLICT, False)]
)
def test_errors_come_before_the_work(inner: LocalTier, source: str, fault: Fault, retryable: bool) -> None:
    tier = FaultyTier(inner)
    for verb, call in verbs(tier, source).items():
        tier.fail(verb, fault)  # type: ignore[arg-type]
        with pytest.raises(TierError, match="injected") as caught:
            call()
        assert caught.value.retryable is retryable
        assert [o.key for o in inner.list("")] == ["old"], verb
    assert tier.tripped(fault) == 7
    for call in verbs(tier, source).values():
        call()  # each happened once


def test_a_lost_answer_comes_after_the_work(inner: LocalTier, source: str) -> None:
    tier = FaultyTier(inner)
    tier.fail("put_file", Fault.LOST_ANSWER)
    tier.fail("alias", Fault.LOST_ANSWER, key="new")
    tier.fail("delete", Fault.LOST_ANSWER)
    for verb in ("put_file", "alias", "delete"):
        with pytest.raises(TierError) as caught:
            verbs(tier, source)[verb]()
        assert caught.value.retryable
    assert [o.key for o in inner.list("")] == ["new"]


def test_missing(inner: LocalTier) -> None:
    tier = FaultyTier(inner)
    tier.fail("read", Fault.MISSING)
    tier.fail("list", Fault.MISSING)
    with pytest.raises(FileNotFoundError):
        tier.read("old")
    assert list(tier.list("")) == []
    assert tier.read("old") == b"data" and len(list(tier.list(""))) == 1


def test_corruption_flips_one_bit_and_says_nothing(inner: LocalTier, tmp_path: Path) -> None:
    tier = FaultyTier(inner)
    big = tmp_path / "big"
    big.write_bytes(b"x" * (BLOCK_BYTES + 9))
    scripted: tuple[Verb, ...] = ("read", "read_range", "put_bytes", "put_file")
    for verb in scripted:
        tier.fail(verb, Fault.CORRUPT)
    assert differing_bits(tier.read("old"), b"data") == 1
    assert differing_bits(tier.read_range("old", 0, 4), b"data") == 1
    assert tier.read("old") == inner.read("old") == b"data"

    tier.put_bytes("new", b"data")
    assert differing_bits(inner.read("new"), b"data") == 1

    tier.fail("alias", Fault.CORRUPT)
    tier.alias("old", "name")
    assert differing_bits(inner.read("name"), b"data") == 1 and inner.read("old") == b"data"

    seen: list[bytes] = []
    tier.put_file("big", str(big), check=seen.append)
    assert b"".join(seen) == big.read_bytes()  # the check saw good bytes
    assert differing_bits(inner.read("big"), big.read_bytes()) == 1


def differing_bits(a: bytes, b: bytes) -> int:
    assert len(a) == len(b)
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_count()


def test_scripts_count_calls_of_their_verb_and_key(inner: LocalTier) -> None:
    tier = FaultyTier(inner)
    tier.fail("put_bytes", Fault.BUSY, at=2, times=2, key="shard")
    outcomes = []
    for key in ("shard-0", "other", "shard-1", "other", "shard-2", "shard-3"):
        try:
            tier.put_bytes(key, b"x")
            outcomes.append("ok")
        except TierError:
            outcomes.append("busy")
    assert outcomes == ["ok", "ok", "busy", "ok", "busy", "ok"]


def test_slowness_is_the_delay_and_the_bytes(inner: LocalTier, tmp_path: Path) -> None:
    pauses: list[float] = []
    tier = SlowTier(inner, delay=timedelta(seconds=5), bytes_per_s=2.0, pause=pauses.append)
    tier.put_bytes("k", b"1234")
    assert sorted(pauses) == [2.0, 5.0]
    pauses.clear()
    assert tier.read("k") == b"1234"
    assert sorted(pauses) == [2.0, 5.0]
    pauses.clear()
    big = tmp_path / "big"
    big.write_bytes(b"x" * (BLOCK_BYTES + 10))
    tier.put_file("big", str(big))
    assert pauses == [5.0, BLOCK_BYTES / 2, 5.0]
    pauses.clear()
    assert {o.key for o in tier.list("")} == {"old", "k", "big"}
    tier.delete("k")
    tier.alias("old", "name")
    assert pauses == [5.0, 5.0, 5.0]


def test_a_slow_tier_can_be_stopped_before_anything_is_visible(inner: LocalTier, source: str) -> None:
    tier = SlowTier(inner, bytes_per_s=1e-6, pause=lambda seconds: True)
    with pytest.raises(TierError, match="stopped") as caught:
        tier.put_file("new", source)
    assert caught.value.retryable
    assert [o.key for o in inner.list("")] == ["old"]


def test_a_recording_tier_remembers_every_call(inner: LocalTier, source: str) -> None:
    tier = RecordingTier(inner)
    for call in verbs(tier, source).values():
        call()
    with pytest.raises(FileNotFoundError):
        tier.read("none")
    assert tier.calls("put_file", "delete") == (Call("put_file", "new"), Call("delete", "old"))
    assert tier.calls() == (
        Call("put_bytes", "new"),
        Call("put_file", "new"),
        Call("alias", "new"),
        Call("read", "old"),
        Call("read_range", "old"),
        Call("list", ""),
        Call("delete", "old"),
        Call("read", "none"),
    )
    tier.forget()
    assert tier.calls() == ()
