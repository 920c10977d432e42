"""The local tier: the tests of every tier, crashes between any two system calls, full and broken disks, and the sync that makes it durable."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.errors import ConfigError, TierError
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers import _file_writer, local, open_tier
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier, fsync_dir, fsync_file
from resiliency.testing.tier_tests import TierTests


def files(root: str) -> set[str]:
    return {p.relative_to(root).as_posix() for p in Path(root).rglob("*") if p.is_file()}


class TestLocal(TierTests):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return open_tier(f"file://{tmp_path}/root")

    def raw_get(self, tier: Tier, key: str) -> bytes | None:
        try:
            return Path(tier.root, key).read_bytes()
        except FileNotFoundError:
            return None

    def raw_put(self, tier: Tier, key: str, data: bytes) -> None:
        path = Path(tier.root, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_keys(self, tier: Tier) -> set[str]:
        return files(tier.root)


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "root")


def test_a_put_holds_two_blocks_in_memory(tier: LocalTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs beside training, in memory that training counts on."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(5 * BLOCK_BYTES))
    mapped: list[int] = []
    real = mmap.mmap
    monkeypatch.setattr(_file_writer.mmap, "mmap", lambda fd, size: (mapped.append(size), real(fd, size))[1])
    tracemalloc.start()
    try:
        tier.put_file("key", str(source), check=lambda block: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(mapped) == 2 * BLOCK_BYTES and peak < BLOCK_BYTES / 8


def partials(root: str) -> set[str]:
    return {name for name in files(root) if name.endswith(".partial")}


# ---- crashes

KILL_AT = """
import os, signal, sys
from resiliency.storage.tiers.local import LocalTier
name, root, source = sys.argv[1:]
real = getattr(os, name)
def killed(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, name, killed)
tier = LocalTier(root)
tier.put_file("a/k", source)
"""


@pytest.mark.parametrize("old", [None, b"old"], ids=["new", "replaced"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_object(
    tier: LocalTier, tmp_path: Path, call: str, old: bytes | None
) -> None:
    if old is not None:
        tier.put_bytes("a/k", old)
    else:
        os.makedirs(os.path.join(tier.root, "a"))  # so that the first fsync is the file's and not a new folder's
    source = tmp_path / "source"
    source.write_bytes(b"new" * 1000)
    child = subprocess.run([sys.executable, "-c", KILL_AT, call, tier.root, str(source)], timeout=60)
    assert child.returncode == -9

    assert len(partials(tier.root)) == 1
    assert [o.key for o in tier.list("")] == (["a/k"] if old is not None else [])
    if old is not None:
        assert tier.read("a/k") == old
    tier.put_file("a/k", str(source))
    assert tier.read("a/k") == b"new" * 1000

    assert tier.sweep(older_than=timedelta(hours=1)) == 0
    assert len(partials(tier.root)) == 1
    assert tier.sweep(older_than=timedelta(0)) == 1
    assert files(tier.root) == {"a/k"}


# ---- disks that fail

RETRYABLE = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.ESTALE]
HOPELESS = [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR]


def failing(code: int) -> Callable[..., object]:
    def fail(*args: object, **options: object) -> object:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "mkdir"])
def test_os_errors_of_a_put(tier: LocalTier, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    tier.put_bytes("a/k", b"old")
    key = "new/k" if call == "mkdir" else "a/k"
    for code in RETRYABLE + HOPELESS:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(code))
            with pytest.raises(TierError) as caught:
                tier.put_bytes(key, b"new")
        message = str(caught.value)
        assert caught.value.retryable == (code in RETRYABLE), message
        assert tier.root in message and key in message and errno.errorcode[code] in message and ";" in message
        assert isinstance(caught.value.__cause__, OSError)
        assert files(tier.root) == {"a/k"} and tier.read("a/k") == b"old"


@pytest.mark.parametrize(("call", "verb"), [("scandir", "list"), ("unlink", "delete"), ("opened", "read")])
def test_os_errors_of_the_other_verbs(tier: LocalTier, monkeypatch: pytest.MonkeyPatch, call: str, verb: str) -> None:
    tier.put_bytes("a/k", b"old")
    verbs: dict[str, Callable[[], object]] = {
        "list": lambda: list(tier.list("a/")),
        "delete": lambda: tier.delete("a/k"),
        "read": lambda: tier.read("a/k"),
    }
    # ENOTDIR means to these verbs that there is nothing, which test_a_missing_key_raises_file_not_found covers.
    for code in [*RETRYABLE, *HOPELESS[:3]]:
        with monkeypatch.context() as patch:
            patch.setattr(local if call == "opened" else os, call, failing(code))
            with pytest.raises(TierError) as caught:
                verbs[verb]()
        assert caught.value.retryable == (code in RETRYABLE), str(caught.value)
        assert tier.root in str(caught.value) and errno.errorcode[code] in str(caught.value)


def test_a_full_disk_leaves_the_old_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """/dev/full takes the place of the temp file: writes to it say ENOSPC, as buffered bytes do at the flush."""
    tier = LocalTier(tmp_path / "root", durable=False)
    tier.put_bytes("k", b"old")
    real = os.open

    def full(path: str, flags: int, *args: int) -> int:
        fd = real(path, flags, *args)
        if flags & os.O_CREAT:
            os.close(fd)
            return real("/dev/full", os.O_WRONLY)
        return fd

    for nbytes in (10, 100_000):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", full)
            with pytest.raises(TierError, match="free space") as caught:
                tier.put_bytes("k", b"x" * nbytes)
        assert caught.value.retryable
        assert files(tier.root) == {"k"} and tier.read("k") == b"old"


def test_a_source_that_cannot_be_read_names_the_source(tier: LocalTier, tmp_path: Path) -> None:
    with pytest.raises(TierError, match=f"read {tmp_path}.*folder stands") as caught:
        tier.put_file("k", str(tmp_path))
    assert not caught.value.retryable


def test_a_file_where_a_folder_is_needed_is_refused(tier: LocalTier) -> None:
    tier.put_bytes("a", b"x")
    with pytest.raises(TierError, match="move it away") as caught:
        tier.put_bytes("a/b", b"y")
    assert not caught.value.retryable
    tier.put_bytes("d/e", b"x")
    with pytest.raises(TierError, match="move it away") as caught:
        tier.put_bytes("d", b"y")
    assert not caught.value.retryable
    assert files(tier.root) == {"a", "d/e"}


# ---- names


@pytest.fixture
def named(tier: LocalTier) -> LocalTier:
    tier.put_bytes("steps/1/shard", b"x" * 1000)
    return tier


def test_a_name_is_a_hard_link_so_that_it_costs_no_bytes_and_is_a_plain_file(named: LocalTier) -> None:
    for name in ("step=1.ckpt", "a/b/step=1.ckpt"):
        named.alias("steps/1/shard", name)
        assert os.path.samefile(named.path(name), named.path("steps/1/shard"))
        assert not os.path.islink(named.path(name)) and partials(named.root) == set()
    assert os.stat(named.path("step=1.ckpt")).st_nlink == 3


def without_hard_links(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "link", failing(code))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV])
def test_without_hard_links_a_name_is_a_symbolic_link_that_survives_a_move_of_the_folder(
    named: LocalTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    without_hard_links(monkeypatch, code)
    for name in ("step=1.ckpt", "a/b/step=1.ckpt", "step=1.ckpt"):
        named.alias("steps/1/shard", name)
        assert named.read(name) == b"x" * 1000 and not os.path.isabs(os.readlink(named.path(name)))
    assert {o.key for o in named.list("")} == {"steps/1/shard", "step=1.ckpt", "a/b/step=1.ckpt"}
    os.rename(named.root, tmp_path / "moved")
    moved = LocalTier(tmp_path / "moved")
    for name in ("step=1.ckpt", "a/b/step=1.ckpt"):
        assert moved.read(name) == b"x" * 1000
        moved.delete(name)
    assert files(moved.root) == {"steps/1/shard"}


def test_without_hard_links_a_name_in_a_folder_that_is_a_link_to_elsewhere_still_leads_back(
    named: LocalTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As from a folder on another disk, to which no hard link leads."""
    without_hard_links(monkeypatch, errno.EXDEV)
    (tmp_path / "else" / "where").mkdir(parents=True)
    os.symlink(tmp_path / "else" / "where", f"{named.root}/linked")
    named.alias("steps/1/shard", "linked/step=1.ckpt")
    assert named.read("linked/step=1.ckpt") == b"x" * 1000


def test_without_hard_links_nothing_and_folders_get_no_name(named: LocalTier, monkeypatch: pytest.MonkeyPatch) -> None:
    without_hard_links(monkeypatch, errno.EPERM)
    for key in ("none", "steps/1", "steps/none"):
        with pytest.raises(TierError) as caught:
            named.alias(key, "name")
        assert not caught.value.retryable
    assert os.listdir(named.root) == ["steps"]


def test_a_name_takes_the_place_of_a_stock_file_and_of_a_dangling_link(named: LocalTier) -> None:
    Path(named.root, "last.ckpt").write_bytes(b"PK\x03\x04 stock")
    os.symlink("nowhere", f"{named.root}/dangling.ckpt")
    for name in ("last.ckpt", "dangling.ckpt"):
        named.alias("steps/1/shard", name)
        assert named.read(name) == b"x" * 1000


def test_a_reader_of_the_file_that_had_the_name_keeps_what_he_opened(named: LocalTier) -> None:
    named.alias("steps/1/shard", "last.ckpt")
    named.put_bytes("steps/2/shard", b"y" * 2000)
    with open(named.path("last.ckpt"), "rb") as file:
        assert file.read(10) == b"x" * 10
        named.alias("steps/2/shard", "last.ckpt")
        named.delete("steps/1/shard")
        assert file.read() == b"x" * 990
    assert named.read("last.ckpt") == b"y" * 2000


def test_a_folder_that_has_the_name_is_left_and_told(named: LocalTier) -> None:
    named.put_bytes("last.ckpt/theirs", b"a stock sharded checkpoint")
    with pytest.raises(TierError, match="'last.ckpt'.*a folder stands where a file belongs") as caught:
        named.alias("steps/1/shard", "last.ckpt")
    assert not caught.value.retryable
    with pytest.raises(TierError, match="a file stands where a folder is needed") as caught:
        named.alias("steps/1/shard", "steps/1/shard/name")
    assert not caught.value.retryable
    assert files(named.root) == {"steps/1/shard", "last.ckpt/theirs"}


@pytest.mark.parametrize("call", ["link", "replace", "fsync"])
def test_os_errors_of_a_name(named: LocalTier, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    named.put_bytes("last.ckpt", b"old")
    for code in [*RETRYABLE, errno.EROFS, errno.EACCES]:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(code))
            with pytest.raises(TierError, match=errno.errorcode[code]) as caught:
                named.alias("steps/1/shard", "last.ckpt")
        assert caught.value.retryable == (code in RETRYABLE)
        assert files(named.root) == {"steps/1/shard", "last.ckpt"}
        assert call == "fsync" or named.read("last.ckpt") == b"old"


def test_a_name_whose_folder_a_delete_removes_is_made_all_the_same(
    named: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link
    lost: list[str] = []

    def link(source: str, target: str) -> None:
        if not lost:
            lost.append(target)
            os.rmdir(os.path.dirname(target))
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    named.alias("steps/1/shard", "a/b/last.ckpt")
    assert lost and named.read("a/b/last.ckpt") == b"x" * 1000


# ---- durability


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths in the order they are synced and renamed ("old -> new")."""
    log: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        log.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def note_replace(old: str, new: str) -> None:
        replace(old, new)
        log.append(f"-> {new}")

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return log


def test_a_durable_put_syncs_new_folders_then_the_file_then_its_name(tier: LocalTier, synced: list[str]) -> None:
    root = tier.root
    tier.put_bytes("a/b/k", b"x")
    parent = os.path.dirname(root)
    assert synced[:3] == [parent, root, f"{root}/a"]
    assert synced[3].startswith(f"{root}/a/b/.resiliency-")
    assert synced[4:] == [f"-> {root}/a/b/k", f"{root}/a/b"]
    synced.clear()
    tier.alias("a/b/k", "c/name")
    assert synced[0] == root and synced[1:] == [f"-> {root}/c/name", f"{root}/c"]
    synced.clear()
    tier.delete("a/b/k")
    assert synced == [f"{root}/a"]


def test_without_durability_nothing_is_synced(tmp_path: Path, synced: list[str]) -> None:
    tier = LocalTier(tmp_path / "root", durable=False)
    tier.put_bytes("a/b/k", b"x")
    tier.alias("a/b/k", "name")
    tier.delete("a/b/k")
    assert synced == [f"-> {tier.root}/a/b/k", f"-> {tier.root}/name"]


def test_files_and_folders_are_fsynced_and_folders_that_cannot_be_are_passed_over(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x")
    fsync_file(str(file))
    fsync_dir(str(tmp_path))
    assert synced == [str(file), str(tmp_path)]
    with pytest.raises(NotADirectoryError):
        fsync_dir(str(file))
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    fsync_dir(str(tmp_path))  # a FUSE mount without folder sync
    with pytest.raises(OSError):
        fsync_file(str(file))
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError):
        fsync_dir(str(tmp_path))


# ---- folders


def test_delete_removes_the_folder_it_empties_and_no_other(tier: LocalTier) -> None:
    tier.put_bytes("a/b/1", b"x")
    tier.put_bytes("a/b/2", b"x")
    tier.delete("a/b/1")
    assert os.path.isdir(f"{tier.root}/a/b")
    tier.delete("a/b/2")
    assert not os.path.exists(f"{tier.root}/a/b") and os.path.isdir(f"{tier.root}/a")
    tier.put_bytes("top", b"x")
    os.rmdir(f"{tier.root}/a")
    tier.delete("top")
    assert os.path.isdir(tier.root)


@pytest.mark.parametrize("race", ["made and removed by another", "removed once made"])
def test_a_put_makes_its_folder_again_when_a_delete_removes_it(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch, race: str
) -> None:
    real = os.mkdir
    lost: list[str] = []

    def mkdir(path: str) -> None:
        if path in lost:
            return real(path)
        lost.append(path)
        if race == "removed once made":
            return None
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    tier.put_bytes("a/b/k", b"x")
    assert tier.read("a/b/k") == b"x"
    assert len(lost) == 3


def test_a_folder_that_never_stays_is_an_error_in_the_end(tier: LocalTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", lambda path: None)
    with pytest.raises(TierError, match="gone"):
        tier.put_bytes("a/k", b"x")


def test_a_put_whose_object_is_deleted_at_once_succeeds(tier: LocalTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put_bytes("a/k", b"x")
    real = os.replace

    def replace(old: str, new: str) -> None:
        real(old, new)
        tier.delete("a/k")

    monkeypatch.setattr(os, "replace", replace)
    tier.put_bytes("a/k", b"y")
    assert files(tier.root) == set()


def test_links_to_folders_are_not_followed_and_links_to_files_are(tier: LocalTier, tmp_path: Path) -> None:
    tier.put_bytes("a/k", b"12345")
    os.symlink(tier.root, f"{tier.root}/a/circle")
    os.symlink(f"{tier.root}/a/k", f"{tier.root}/last.ckpt")
    os.symlink(tmp_path / "nowhere", f"{tier.root}/dangling")
    os.mkfifo(f"{tier.root}/pipe")
    assert {(o.key, o.nbytes) for o in tier.list("")} == {("a/k", 5), ("last.ckpt", 5)}


def test_files_that_vanish_during_a_listing_are_left_out(tier: LocalTier, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/1", "a/2", "b/1"):
        tier.put_bytes(name, b"x")
    listing = tier.list("")
    first = next(listing)
    for name in ("a/1", "a/2", "b/1"):
        if name != first.key:
            tier.delete(name)
    assert [o.key for o in listing] == []


def test_new_files_have_the_mode_of_the_umask(tier: LocalTier) -> None:
    old = os.umask(0o027)
    try:
        tier.put_bytes("k", b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(f"{tier.root}/k").st_mode) == 0o640


def test_the_names_of_files_in_flight_are_refused(tier: LocalTier) -> None:
    name = ".resiliency-" + "0" * 32 + ".partial"
    with pytest.raises(TierError, match="reserved"):
        tier.put_bytes(f"a/{name}", b"x")
    tier.put_bytes("a/.resiliency-run.partial", b"x")
    assert [o.key for o in tier.list("")] == ["a/.resiliency-run.partial"]


# ---- addresses


def test_every_spelling_of_a_folder_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address, root in {
        str(tmp_path / "x"): tmp_path / "x",
        "x": tmp_path / "x",
        f"file://{tmp_path}/a%20b": tmp_path / "a b",
        f"file://localhost{tmp_path}/x/": tmp_path / "x",
        f"FILE://{tmp_path}/x": tmp_path / "x",
        str(tmp_path / "a%20b:c"): tmp_path / "a%20b:c",
    }.items():
        tier = open_tier(address, durable=False, name="mine")
        assert isinstance(tier, LocalTier)
        assert (tier.root, tier.name, tier.durable, tier.is_local) == (str(root), "mine", False, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "address", ["", "file://", "file://otherhost/x", "ftp://host/x", "gs://", "gs:///x", "gs://b//x"]
)
def test_addresses_that_name_nothing_are_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        open_tier(address)


def test_opening_a_local_tier_imports_neither_fsspec_nor_torch() -> None:
    code = (
        "import sys; from resiliency.storage.tiers import open_tier; open_tier('/x');"
        "bad = {'torch', 'fsspec', 'gcsfs', 'aiohttp'} & set(sys.modules); sys.exit(repr(bad) if bad else 0)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_no_file_is_no_object_and_is_not_waited_for(tier: LocalTier, kind: str) -> None:
    tier.put_bytes("a", b"1")
    path = tier.path("b")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path)
    done = threading.Event()

    def end_waiting_readers() -> None:
        while not done.wait(2):
            with suppress(OSError):  # nobody reads
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    writer = threading.Thread(target=end_waiting_readers)
    writer.start()
    began = time.monotonic()
    with pytest.raises(TierError, match="stands where a file belongs"):
        tier.read("b")
    with pytest.raises(TierError, match="stands where a file belongs"):
        tier.read_range("b", 0, 1)
    with pytest.raises(TierError, match="stands where a file belongs"):
        tier.put_file("c", path)
    took = time.monotonic() - began
    done.set()
    writer.join()
    assert took < 1.5 and [info.key for info in tier.list("")] == ["a"]
    tier.alias("a", "b")
    assert tier.read("b") == b"1"
