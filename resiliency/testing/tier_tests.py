"""The tests every storage tier must pass: subclass :class:`TierTests`, supply the tier and raw access to its objects.

::

    class TestMyTier(TierTests):
        @pytest.fixture
        def tier(self, tmp_path):
            return MyTier(...)

        def raw_get(self, tier, key): ...
        def raw_put(self, tier, key, data): ...
        def raw_keys(self, tier): ...

The raw verbs bypass the tier, so that a tier that only reads back its own cache fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resiliency.errors import TierError
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers.base import Tier

__all__ = ["TierTests"]

ODD_KEYS = [
    "epoch=0-step=100-val_loss=0.25.ckpt",
    "a folder/with spaces .txt",
    "ünï/日本語/🙂",
    "percent%20/plus+&amp;?query#hash",
    "star*/[x]{y}/~",
    "comma,colon:semicolon;'quote'\"double\"",
    "back\\slash",
    ".hidden/..twice/...",
    "long/" + "x" * 200,
]
BAD_KEYS = ["", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "./a", "a/.", "a\nb", "a\0b", "\ud800"]

#: Deadline of every wait in these tests, in seconds.
DEADLINE_S = 60.0


class Refusal(Exception):
    """Raised by the ``check`` callbacks of these tests."""


class TierTests:
    """The tests of a tier. Every test gets a fresh, empty tier from the fixture ``tier``."""

    @pytest.fixture
    def tier(self) -> Tier:
        raise NotImplementedError("supply a fixture 'tier' that gives an empty tier")

    def raw_get(self, tier: Tier, key: str) -> bytes | None:
        """The object's bytes, read without the tier; None when there is none."""
        raise NotImplementedError

    def raw_put(self, tier: Tier, key: str, data: bytes) -> None:
        """Stores an object without the tier."""
        raise NotImplementedError

    def raw_keys(self, tier: Tier) -> set[str]:
        """Keys of all stored objects, including those that the tier hides, read without the tier."""
        raise NotImplementedError

    # ---- name and root

    def test_a_tier_has_a_name_and_a_root(self, tier: Tier) -> None:
        assert tier.name and isinstance(tier.name, str)
        assert tier.root and isinstance(tier.root, str)
        assert isinstance(tier.is_local, bool) and isinstance(tier.durable, bool)

    # ---- bytes in, bytes out

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 300], ids=["empty", "one", "75k"])
    def test_put_bytes_stores_them(self, tier: Tier, data: bytes) -> None:
        tier.put_bytes("a/b", data)
        assert self.raw_get(tier, "a/b") == data
        assert tier.read("a/b") == data

    @pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 123])
    def test_put_file_stores_every_block(self, tier: Tier, tmp_path: Path, nbytes: int) -> None:
        source = _file(tmp_path, nbytes)
        data = source.read_bytes()
        blocks: list[bytes] = []
        told: list[int] = []
        tier.put_file("a/big", str(source), check=lambda block: blocks.append(bytes(block)), progress=told.append)
        assert self.raw_get(tier, "a/big") == data
        assert tier.read("a/big") == data
        assert [len(block) for block in blocks] == [BLOCK_BYTES] * (nbytes // BLOCK_BYTES) + [
            nbytes % BLOCK_BYTES
        ] * bool(nbytes % BLOCK_BYTES)
        assert b"".join(blocks) == data
        assert told == sorted(told) and (told[-1:] == [nbytes] or nbytes == 0)
        assert source.read_bytes() == data

    def test_what_others_wrote_is_read(self, tier: Tier) -> None:
        self.raw_put(tier, "a/b", b"old")
        assert tier.read("a/b") == b"old"
        self.raw_put(tier, "a/b", b"new!")
        assert tier.read("a/b") == b"new!"
        assert tier.read_range("a/b", 0, 9) == b"new!"

    def test_a_put_replaces_the_object(self, tier: Tier, tmp_path: Path) -> None:
        tier.put_bytes("k", b"long and old")
        tier.put_bytes("k", b"new")
        assert self.raw_get(tier, "k") == b"new"
        source = _file(tmp_path, BLOCK_BYTES + 1)
        tier.put_file("k", str(source))
        assert self.raw_get(tier, "k") == source.read_bytes()
        tier.put_bytes("k", b"")
        assert self.raw_get(tier, "k") == b""

    def test_odd_keys_are_kept_to_the_letter(self, tier: Tier, tmp_path: Path) -> None:
        for key in ODD_KEYS:
            self._keeps(tier, tmp_path, key)
            self.raw_put(tier, key, b"raw")
            assert tier.read(key) == b"raw"
        assert {o.key for o in tier.list("")} == set(ODD_KEYS) == self.raw_keys(tier)

    def _keeps(self, tier: Tier, tmp_path: Path, key: str) -> None:
        others = self.raw_keys(tier)
        tier.put_bytes(key, b"1")
        assert self.raw_get(tier, key) == b"1"
        assert self.raw_keys(tier) == {key, *others}
        assert [(o.key, o.nbytes) for o in tier.list(key)] == [(key, 1)]
        tier.put_file(key, str(_file(tmp_path, 5)))
        assert len(tier.read(key)) == 5 == len(tier.read_range(key, 0, 10))
        tier.alias(key, "name")
        assert self.raw_get(tier, "name") == self.raw_get(tier, key)
        tier.put_bytes("name", b"2")
        tier.alias("name", key)
        assert self.raw_get(tier, key) == b"2"
        tier.delete("name")
        tier.delete(key)
        assert self.raw_keys(tier) == others

    def test_bad_keys_are_refused_by_every_verb(self, tier: Tier, tmp_path: Path) -> None:
        source = str(_file(tmp_path, 1))
        verbs: dict[str, Callable[[str], object]] = {
            "put_bytes": lambda key: tier.put_bytes(key, b"x"),
            "put_file": lambda key: tier.put_file(key, source),
            "read": tier.read,
            "alias of": lambda key: tier.alias(key, "name"),
            "alias as": lambda key: tier.alias("key", key),
            "read_range": lambda key: tier.read_range(key, 0, 1),
            "delete": tier.delete,
        }
        for key in BAD_KEYS:
            for name, verb in verbs.items():
                assert _refusal(lambda: verb(key)), f"{name} of {key!r} was not refused"  # noqa: B023  # called at once
        assert self.raw_keys(tier) == set()

    # ---- ranges

    def test_a_range_returns_its_bytes(self, tier: Tier) -> None:
        data = b"0123456789"
        self.raw_put(tier, "k", data)
        for start, end in ((0, 10), (0, 1), (3, 7), (7, 99), (4, 4), (10, 12), (50, 60)):
            assert tier.read_range("k", start, end) == data[start:end], (start, end)

    def test_a_range_of_an_empty_object_is_empty(self, tier: Tier) -> None:
        self.raw_put(tier, "k", b"")
        assert tier.read_range("k", 0, 5) == b""

    def test_a_range_across_blocks(self, tier: Tier, tmp_path: Path) -> None:
        source = _file(tmp_path, 2 * BLOCK_BYTES + 5)
        tier.put_file("k", str(source))
        start, end = BLOCK_BYTES - 3, 2 * BLOCK_BYTES + 2
        assert tier.read_range("k", start, end) == source.read_bytes()[start:end]

    def test_invalid_ranges_are_refused(self, tier: Tier) -> None:
        self.raw_put(tier, "k", b"0123456789")
        for start, end in ((-1, 3), (3, 2), (0, -1)):
            assert _refusal(lambda: tier.read_range("k", start, end)), (start, end)  # noqa: B023  # called at once

    # ---- missing objects

    def test_a_missing_key_raises_file_not_found(self, tier: Tier) -> None:
        self.raw_put(tier, "a/b/c", b"x")
        for key in ("z", "a/z", "a/b", "a/b/c/d"):
            with pytest.raises(FileNotFoundError):
                tier.read(key)
            for start, end in ((0, 5), (2, 2)):
                with pytest.raises(FileNotFoundError):
                    tier.read_range(key, start, end)
            tier.delete(key)
        assert self.raw_keys(tier) == {"a/b/c"}

    def test_a_missing_source_is_an_error_and_stores_nothing(self, tier: Tier, tmp_path: Path) -> None:
        with pytest.raises(TierError, match="gone") as caught:
            tier.put_file("k", str(tmp_path / "gone"))
        assert not caught.value.retryable
        assert self.raw_keys(tier) == set()

    def test_delete_takes_one_object_and_may_be_repeated(self, tier: Tier) -> None:
        for key in ("a/b", "a/bc", "a/b.x/c"):
            self.raw_put(tier, key, b"x")
        tier.delete("a/b")
        tier.delete("a/b")
        assert self.raw_keys(tier) == {"a/bc", "a/b.x/c"}
        with pytest.raises(FileNotFoundError):
            tier.read("a/b")

    def test_a_deleted_folder_can_be_used_again(self, tier: Tier) -> None:
        for data in (b"1", b"22"):
            tier.put_bytes("deep/er/k", data)
            assert tier.read("deep/er/k") == data
            tier.delete("deep/er/k")
            assert list(tier.list("deep/")) == []

    # ---- one object under two keys

    @pytest.mark.parametrize("nbytes", [0, 1, 2 * BLOCK_BYTES + 5])
    @pytest.mark.parametrize("name", ["name", "a/name", "new/folder/name"])
    def test_an_alias_has_the_objects_bytes(self, tier: Tier, tmp_path: Path, name: str, nbytes: int) -> None:
        source = _file(tmp_path, nbytes)
        data = source.read_bytes()
        tier.put_file("a/key", str(source))
        tier.alias("a/key", name)
        for key in ("a/key", name):
            assert self.raw_get(tier, key) == data
            assert tier.read(key) == data
        assert tier.read_range(name, 3, 9) == data[3:9]
        assert {o.key: o.nbytes for o in tier.list("")} == {"a/key": nbytes, name: nbytes}
        assert self.raw_keys(tier) == {"a/key", name}

    def test_an_alias_replaces_what_has_its_name(self, tier: Tier) -> None:
        self.raw_put(tier, "f/name", b"somebody else's")
        for key in ("1", "22", "1"):
            tier.put_bytes(key, key.encode())
            tier.alias(key, "f/name")
            tier.alias(key, "f/name")  # again, as after a lost answer
            assert self.raw_get(tier, "f/name") == key.encode()
        assert self.raw_keys(tier) == {"1", "22", "f/name"}

    def test_an_alias_and_its_object_outlive_each_other(self, tier: Tier) -> None:
        for first, second in (("a/key", "b/name"), ("b/name", "a/key")):
            tier.put_bytes("a/key", b"x")
            tier.alias("a/key", "b/name")
            tier.delete(first)
            assert self.raw_keys(tier) == {second} and tier.read(second) == b"x"
            tier.delete(second)

    def test_an_alias_keeps_its_bytes_when_the_object_is_replaced(self, tier: Tier, tmp_path: Path) -> None:
        """The object keeps its bytes when the alias is replaced, too: both are replaced whole, and never written to."""
        tier.put_bytes("key", b"old")
        tier.alias("key", "name")
        tier.put_bytes("key", b"new!")
        assert (tier.read("key"), tier.read("name")) == (b"new!", b"old")
        tier.put_file("name", str(_file(tmp_path, 7)))
        assert tier.read("key") == b"new!" and len(tier.read("name")) == 7

    def test_an_alias_of_itself_changes_nothing(self, tier: Tier) -> None:
        tier.put_bytes("a/key", b"x")
        tier.alias("a/key", "a/key")
        assert self.raw_get(tier, "a/key") == b"x" and self.raw_keys(tier) == {"a/key"}

    @pytest.mark.parametrize("key", ["z", "a/z", "a", "a/key/z"])
    def test_an_alias_of_nothing_is_an_error_and_leaves_what_has_the_name(self, tier: Tier, key: str) -> None:
        self.raw_put(tier, "a/key", b"x")
        self.raw_put(tier, "name", b"old")
        assert _refusal(lambda: tier.alias(key, "name"))
        assert _refusal(lambda: tier.alias(key, "new/name"))
        assert self.raw_get(tier, "name") == b"old" and self.raw_keys(tier) == {"a/key", "name"}

    def test_readers_of_a_name_always_see_one_of_its_objects(self, tier: Tier) -> None:
        """Readers see one of the two objects while the name moves from one to the other."""
        objects = {"a": b"a" * 100_000, "b": b"b" * 200_000}
        for key, data in objects.items():
            tier.put_bytes(key, data)
        tier.alias("a", "last")
        done = threading.Event()

        def read() -> int:
            seen = 0
            while not done.is_set() or not seen:
                assert tier.read("last") in objects.values()
                assert "last" in {o.key for o in tier.list("")}
                seen += 1
            return seen

        def move() -> None:
            for key in "baba":
                tier.alias(key, "last")

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            writers = [pool.submit(move) for _ in range(2)]
            try:
                for writer in writers:
                    writer.result(DEADLINE_S)
            finally:
                done.set()
            assert all(reader.result(DEADLINE_S) for reader in readers)
        assert self.raw_keys(tier) == {"a", "b", "last"}

    # ---- listings

    def test_a_listing_has_every_key_with_the_prefix(self, tier: Tier) -> None:
        sizes = {"a": 1, "ab/x": 2, "ab/y/z": 3, "ab/y/deep/er": 4, "abc/x": 5, "b": 0}
        for key, nbytes in sizes.items():
            self.raw_put(tier, key, b"x" * nbytes)

        def listed(prefix: str) -> dict[str, int]:
            found = list(tier.list(prefix))
            assert len(found) == len({o.key for o in found})
            return {o.key: o.nbytes for o in found}

        assert listed("") == sizes
        for prefix in (
            "a",
            "ab",
            "ab/",
            "ab/y",
            "ab/y/",
            "ab/y/deep/",
            "ab/x",
            "abc/",
            "b",
            "b/",
            "zz",
            "zz/",
            "ab/zz/",
            "a/",
        ):
            assert listed(prefix) == {key: n for key, n in sizes.items() if key.startswith(prefix)}, prefix

    def test_an_empty_tier_lists_nothing(self, tier: Tier) -> None:
        assert list(tier.list("")) == [] == list(tier.list("a/"))

    def test_listings_see_what_others_did_meanwhile(self, tier: Tier) -> None:
        tier.put_bytes("a/1", b"x")
        assert {o.key for o in tier.list("a/")} == {"a/1"}
        self.raw_put(tier, "a/2", b"y")
        assert {o.key for o in tier.list("a/")} == {"a/1", "a/2"}
        assert {o.key for o in tier.list("")} == {"a/1", "a/2"}

    def test_bad_prefixes_are_refused(self, tier: Tier) -> None:
        for prefix in ("/", "/a", "a//", "../", "a/../b", "..", "./a", "a\n"):
            assert _refusal(lambda: [*tier.list(prefix)]), repr(prefix)  # noqa: B023  # called at once

    # ---- atomicity

    @pytest.mark.parametrize("old", [None, b"old"], ids=["new", "replaced"])
    @pytest.mark.parametrize("bad_block", [0, 1, 2])
    def test_a_check_that_raises_leaves_no_trace(
        self, tier: Tier, tmp_path: Path, bad_block: int, old: bytes | None
    ) -> None:
        if old is not None:
            self.raw_put(tier, "a/k", old)
        refusal = Refusal()
        passed: list[bytes] = []

        def check(block: bytes | memoryview) -> None:
            if len(passed) == bad_block:
                raise refusal
            passed.append(bytes(block))

        with pytest.raises(Refusal) as caught:
            tier.put_file("a/k", str(_file(tmp_path, 2 * BLOCK_BYTES + 7)), check=check)
        assert caught.value is refusal
        assert self.raw_get(tier, "a/k") == old
        assert self.raw_keys(tier) == ({"a/k"} if old is not None else set())

    def test_a_check_that_raises_an_os_error_is_not_taken_for_the_tiers_own(self, tier: Tier, tmp_path: Path) -> None:
        error = OSError(5, "mine")

        def check(block: bytes | memoryview) -> None:
            raise error

        with pytest.raises(OSError) as caught:
            tier.put_file("k", str(_file(tmp_path, 10)), check=check)
        assert caught.value is error
        assert self.raw_keys(tier) == set()

    @pytest.mark.parametrize("old", [None, b"old"], ids=["new", "replaced"])
    def test_nothing_is_seen_of_a_put_under_way(self, tier: Tier, tmp_path: Path, old: bytes | None) -> None:
        if old is not None:
            self.raw_put(tier, "a/k", old)
        expected = [("a/k", len(old))] if old is not None else []
        seen: list[tuple[bytes | None, list[tuple[str, int]]]] = []

        def look(block: bytes | memoryview) -> None:
            seen.append((self.raw_get(tier, "a/k"), [(o.key, o.nbytes) for o in tier.list("a/")]))

        source = _file(tmp_path, 2 * BLOCK_BYTES + 7)
        tier.put_file("a/k", str(source), check=look)
        assert seen == [(old, expected)] * 3
        assert self.raw_get(tier, "a/k") == source.read_bytes()

    # ---- threads

    def test_writers_of_one_key_never_mix(self, tier: Tier, tmp_path: Path) -> None:
        """Every reader sees one writer's complete object while writers of small and big objects race."""
        whole = {bytes([65 + i]) * (1000 + i) for i in range(3)}
        big = _file(tmp_path, BLOCK_BYTES + 11)
        whole.add(big.read_bytes())
        small = sorted(data for data in whole if len(data) < BLOCK_BYTES)
        tier.put_bytes("k", small[0])
        done = threading.Event()

        def read() -> int:
            seen = 0
            while not done.is_set() or not seen:
                assert tier.read("k") in whole
                seen += 1
            return seen

        def write(data: bytes) -> None:
            for _ in range(8):
                tier.put_bytes("k", data)

        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            writers = [pool.submit(write, data) for data in small]
            writers.append(pool.submit(tier.put_file, "k", str(big)))
            try:
                for writer in writers:
                    writer.result(DEADLINE_S)
            finally:
                done.set()
            assert all(reader.result(DEADLINE_S) for reader in readers)
        assert tier.read("k") in whole
        assert self.raw_keys(tier) == {"k"}

    def test_puts_and_deletes_in_one_folder_do_not_disturb_each_other(self, tier: Tier) -> None:
        """Folders that are made and removed as they fill and empty cause no errors, and listings stay complete."""

        def churn(index: int) -> None:
            for turn in range(15):
                tier.put_bytes(f"f/g/{index}", b"%d" % turn)
                tier.alias(f"f/g/{index}", f"f/h/{index}")
                tier.delete(f"f/h/{index}")
                assert f"f/g/{index}" in {o.key for o in tier.list("f/")}
                assert tier.read(f"f/g/{index}") == b"%d" % turn
                tier.delete(f"f/g/{index}")

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(churn, i) for i in range(4)]:
                future.result(DEADLINE_S)
        assert self.raw_keys(tier) == set()


def _refusal(call: Callable[[], object]) -> bool:
    """True when ``call`` raises a TierError that is not retryable."""
    try:
        call()
    except TierError as error:
        return not error.retryable
    return False


def _file(folder: Path, nbytes: int) -> Path:
    """A file whose blocks all differ."""
    path = folder / f"source-{nbytes}"
    unit = bytes(range(256)) * 4096
    with path.open("wb") as file:
        for number in range(0, nbytes, len(unit)):
            file.write((number.to_bytes(8, "little") + unit)[: min(len(unit), nbytes - number)])
    return path
