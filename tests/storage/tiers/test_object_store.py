"""The object store tier: the tests of every tier in memory and against a real GCS emulator, and crossing a fork, a kill and a restart."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError, TierError
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers import object_store, open_tier
from resiliency.storage.tiers._upload import Upload
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.object_store import ObjectStoreTier
from resiliency.testing.gcs_server import FakeGcs, GcsFolder
from resiliency.testing.tier_tests import TierTests


@pytest.fixture
def tier(bucket: GcsFolder) -> Iterator[ObjectStoreTier]:
    """Parts of one block, so that an object of two blocks and a bit has three."""
    made = ObjectStoreTier(bucket.url, storage_options=bucket.server.storage_options, part_bytes=BLOCK_BYTES)
    yield made
    made.close()


class TestGcs(TierTests):
    @pytest.fixture(autouse=True)
    def setup(self, bucket: GcsFolder) -> None:
        self.bucket = bucket

    @pytest.fixture
    def tier(self, tier: ObjectStoreTier) -> Tier:
        return tier

    def raw_get(self, tier: Tier, key: str) -> bytes | None:
        return self.bucket.get(key)

    def raw_put(self, tier: Tier, key: str, data: bytes) -> None:
        self.bucket.put(key, data)

    def raw_keys(self, tier: Tier) -> set[str]:
        return self.bucket.keys()


class TestMemory(TierTests):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        made = open_tier(f"memory://{uuid.uuid4().hex}/job")
        yield made
        for key in self.raw_keys(made):
            del self._store()[self._path(made, key)]

    def raw_get(self, tier: Tier, key: str) -> bytes | None:
        file = self._store().get(self._path(tier, key))
        return None if file is None else bytes(file.getvalue())

    def raw_put(self, tier: Tier, key: str, data: bytes) -> None:
        import fsspec

        fsspec.filesystem("memory").pipe_file(self._path(tier, key), data)

    def raw_keys(self, tier: Tier) -> set[str]:
        top = self._path(tier, "")
        return {name.removeprefix(top) for name in self._store() if name.startswith(top)}

    def _path(self, tier: Tier, key: str) -> str:
        return f"/{tier.root.removeprefix('memory://')}/{key}"

    def _store(self) -> dict[str, Any]:
        import fsspec

        store: dict[str, Any] = fsspec.filesystem("memory").store
        return store


# ---- big objects


def test_a_big_object_is_read_in_pieces(
    tier: ObjectStoreTier, bucket: GcsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PIECE_BYTES", 1000)
    for nbytes in (999, 1000, 1001, 2000, 3500):
        data = bytes(range(256)) * (nbytes // 256 + 1)
        assert len(list(tier.list(""))) <= 1  # what it remembers of the listing must not be used
        bucket.put("k", data[:nbytes])
        assert tier.read("k") == data[:nbytes]
        assert tier.read_range("k", 3, 9999) == data[3:nbytes]
        assert tier.read_range("k", 500, 2750) == data[500 : min(2750, nbytes)]


def test_an_object_replaced_between_two_pieces_is_not_mixed(
    tier: ObjectStoreTier, bucket: GcsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PIECE_BYTES", 1000)
    bucket.put("k", b"a" * 2500)
    piece, calls = tier._piece, 0

    def replace_in_between(key: str, start: int, end: int, **pin: object) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 3:  # the first is the probe, the second the first piece
            bucket.put("k", b"b" * 2500)
        return piece(key, start, end, **pin)

    monkeypatch.setattr(tier, "_piece", replace_in_between)
    with pytest.raises(TierError, match="replaced or deleted while it was read") as caught:
        tier.read("k")
    assert caught.value.retryable


def test_an_object_cut_short_between_two_pieces_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store has no versions to ask for."""
    monkeypatch.setattr(object_store, "_PIECE_BYTES", 1000)
    tier = ObjectStoreTier(f"memory://{uuid.uuid4().hex}")
    tier.put_bytes("k", b"a" * 2500)
    piece = tier._piece

    def cut(key: str, start: int, end: int, **pin: object) -> bytes:
        if start == 2000:
            tier.put_bytes("k", b"a" * 2100)
        return piece(key, start, end, **pin)

    monkeypatch.setattr(tier, "_piece", cut)
    with pytest.raises(TierError, match="replaced or deleted while it was read") as caught:
        tier.read("k")
    assert caught.value.retryable
    tier.delete("k")


def test_parts_larger_than_blocks_gather_blocks(bucket: GcsFolder, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(251)) * (3 * BLOCK_BYTES // 251 + 7))
    tier = ObjectStoreTier(bucket.url, storage_options=bucket.server.storage_options)
    told: list[int] = []
    tier.put_file("k", str(source), progress=told.append)
    tier.close()
    assert bucket.get("k") == source.read_bytes()
    assert told == [BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES, source.stat().st_size]


@pytest.mark.parametrize("part_bytes", [BLOCK_BYTES, 4 * BLOCK_BYTES], ids=["sent in part", "only buffered"])
def test_an_abandoned_upload_cannot_be_published_later(
    bucket: GcsFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """fsspec's file handles send and publish what they hold when they are garbage, unless they are closed."""
    handles: list[Any] = []

    class Spy(Upload):
        def __init__(self, handle: Any) -> None:
            handles.append(handle)
            super().__init__(handle)

    monkeypatch.setattr(object_store, "Upload", Spy)
    tier = ObjectStoreTier(bucket.url, storage_options=bucket.server.storage_options, part_bytes=part_bytes)
    source = tmp_path / "source"
    source.write_bytes(b"x" * (BLOCK_BYTES + 5))
    with pytest.raises(KeyboardInterrupt):
        tier.put_file("k", str(source), progress=interrupt)
    tier.close()
    assert [handle.closed for handle in handles] == [True]
    assert bucket.keys() == set()


def interrupt(sent: int) -> None:
    raise KeyboardInterrupt


# ---- processes

CHILD = """
import os, signal, sys
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers.object_store import ObjectStoreTier
what, url, endpoint, source = sys.argv[1:]
options = {"endpoint_url": endpoint, "token": "anon", "project": "test"}
tier = ObjectStoreTier(url, storage_options=options, part_bytes=BLOCK_BYTES)
if what == "kill":
    blocks = []
    def check(block):
        blocks.append(block)
        if len(blocks) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    tier.put_file("k", source, check=check)
else:
    tier.put_bytes("parent", b"x")
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            assert tier.read("parent") == b"x"
            tier.put_bytes("child", b"y")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert tier.read("child") == b"y"
    tier.close()
"""


def run_child(what: str, bucket: GcsFolder, source: Path) -> subprocess.CompletedProcess[str]:
    arguments = [what, bucket.url, bucket.server.url, str(source)]
    return subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, timeout=60)


def test_a_writer_killed_before_the_end_leaves_no_object(bucket: GcsFolder, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * (2 * BLOCK_BYTES + 5))
    child = run_child("kill", bucket, source)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert bucket.keys() == set()


def test_a_tier_crosses_a_fork(bucket: GcsFolder, tmp_path: Path) -> None:
    child = run_child("fork", bucket, tmp_path)
    assert child.returncode == 0, child.stderr
    assert bucket.keys() == {"parent", "child"}


def test_a_closed_tier_opens_again(tier: ObjectStoreTier) -> None:
    tier.close()
    tier.put_bytes("k", b"x")
    session = tier._filesystem()._session
    tier.close()
    assert session.closed
    tier.close()
    assert tier.read("k") == b"x"


# ---- addresses and options


def test_what_the_tiers_say_of_themselves(gcs: FakeGcs) -> None:
    tier = open_tier("gs://bucket/job/", name="backup")
    assert (tier.name, tier.root, tier.is_local, tier.durable) == ("backup", "gs://bucket/job", False, True)
    assert not open_tier("memory://x").durable
    tier = open_tier("gs://bucket", storage_options=gcs.storage_options)
    tier.put_bytes("top=level", b"x")
    assert [o.key for o in tier.list("top")] == ["top=level"]
    assert isinstance(tier, ObjectStoreTier)
    tier.close()


def test_the_callers_options_are_left_alone() -> None:
    options = {"token": "anon"}
    ObjectStoreTier("gs://bucket", storage_options=options)
    assert options == {"token": "anon"}


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"retry_timeout": timedelta(0)},
        {"request_timeout": timedelta(0)},
        {"backoff": timedelta(seconds=-1)},
        {"part_bytes": 0},
        {"part_bytes": 1000},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gs://bucket"):
        ObjectStoreTier("gs://bucket", **options)


def test_a_missing_package_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gcsfs" else object())
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        open_tier("gs://bucket")


def test_folders_are_no_object_stores(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mount"):
        ObjectStoreTier(f"file://{tmp_path}")
