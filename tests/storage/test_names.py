"""A name is the step itself: given at once, taken from nobody else, and taken away only by the one whose it is."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from resiliency.errors import TierError
from resiliency.storage import names as names_module
from resiliency.storage.blocks import block_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.format_version import FORMAT_VERSION
from resiliency.storage.manifest import MANIFEST, Manifest, ShardRecord, UnfinishedStep, gather_records, record_file
from resiliency.storage.names import delete_names, give_name, missing_names, read_name
from resiliency.storage.shard_file import DATA_PICKLE, Identity, archive_tail, lay_out_storages
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import make_checkpointer, make_state
from resiliency.testing.tier_doubles import Fault, FaultyTier, RecordingTier

FIRST, SECOND = StepId(1, 1, "0a0b0c"), StepId(2, 1, "0a0b0c")
EMPTY = [(DATA_PICKLE, b"\x80\x02}q\x00.")]


@pytest.fixture(autouse=True)
def not_warned_yet() -> None:
    names_module._warn_once.cache_clear()


@pytest.fixture(params=["folder", "object store"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "folder":
        return LocalTier(tmp_path / "tier")
    return open_tier(f"memory://{uuid.uuid4().hex}/job")


def step(
    tier: Tier, id: StepId = FIRST, *, run: str = "r", ranks: int = 1, replicated: bool = True, of: int | None = None
) -> Manifest | UnfinishedStep:
    """A step on the tier, whose files say whose they are. ``of``: it has more shards, on other hosts."""
    world_size = of or ranks
    records = []
    for rank in range(ranks):
        identity = Identity(id=id, run=run, rank=rank, world_size=world_size, replicated=replicated)
        data = identity.to_bytes() + archive_tail(lay_out_storages([]), EMPTY)
        record = ShardRecord(
            id=id,
            run=run,
            rank=rank,
            world_size=world_size,
            node="n",
            nbytes=len(data),
            block_bytes=8 << 20,
            digests=(block_digest(data),),
            plan="p",
            replicated=replicated,
        )
        tier.put_bytes(step_prefix(run, id) + record.file, data)
        tier.put_bytes(step_prefix(run, id) + record_file(rank), json.dumps(record.to_dict()).encode())
        records.append(record)
    found = gather_records(records)
    assert found is not None
    if isinstance(found, Manifest):
        tier.put_bytes(step_prefix(run, id) + MANIFEST, found.to_json().encode())
    return found


def holder(tier: Tier, name: str) -> tuple[str, int] | None:
    """Run and step number of a name."""
    found = read_name(tier, name)
    return None if found is None else (found.run, found.id.step)


def below(tier: Tier, name: str) -> list[str]:
    return sorted(info.key for info in tier.list(name))


@pytest.mark.parametrize("replicated", [True, False], ids=["replicated", "sharded"])
def test_a_step_that_comes_late_does_not_take_the_name_from_a_newer_one(tier: Tier, replicated: bool) -> None:
    early, late = step(tier, SECOND, replicated=replicated), step(tier, FIRST, replicated=replicated)
    assert give_name(tier, early, "last.ckpt")
    give_name(tier, late, "last.ckpt")
    assert holder(tier, "last.ckpt") == ("r", 2)
    tier.delete(step_prefix("r", SECOND) + MANIFEST)  # it does not count any more
    tier.delete(step_prefix("r", SECOND) + record_file(0))
    give_name(tier, late, "last.ckpt")
    assert holder(tier, "last.ckpt") == ("r", 1)


# -- giving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step=1.ckpt", "sub/folder/last.ckpt"])
def test_the_name_of_a_replicated_step_is_its_first_shard(tier: Tier, name: str) -> None:
    found = step(tier, ranks=2)
    for _ in range(2):  # safe to repeat
        assert give_name(tier, found, name)
        assert tier.read(name) == tier.read(step_prefix("r", FIRST) + "shard-00000.shard")
    assert below(tier, name) == [name]


def test_the_name_of_a_sharded_step_is_a_folder_with_its_shards_and_its_manifest(tier: Tier) -> None:
    found = step(tier, ranks=2, replicated=False)
    for _ in range(2):
        assert give_name(tier, found, "last.ckpt")
        assert below(tier, "last.ckpt") == [
            "last.ckpt/__0_0.distcp",
            "last.ckpt/__1_0.distcp",
            "last.ckpt/manifest.json",
        ]
    for file in ("manifest.json", "__1_0.distcp"):
        assert tier.read(f"last.ckpt/{file}") == tier.read(step_prefix("r", FIRST) + file)
    assert holder(tier, "last.ckpt") == ("r", 1)


def test_a_host_names_its_part_of_a_sharded_step_and_has_no_manifest(tier: Tier) -> None:
    found = step(tier, ranks=2, of=3, replicated=False)
    assert isinstance(found, UnfinishedStep)
    assert give_name(tier, found, "last.ckpt")
    assert below(tier, "last.ckpt") == ["last.ckpt/__0_0.distcp", "last.ckpt/__1_0.distcp"]
    tier.delete("last.ckpt/__0_0.distcp")
    assert holder(tier, "last.ckpt") == ("r", 1), "the host of rank 1 does not know whose the name is"


SHAPES = [(1, True), (2, True), (1, False), (3, False)]


@pytest.mark.parametrize(("before", "was_replicated"), SHAPES)
@pytest.mark.parametrize(("after", "is_replicated"), SHAPES)
def test_a_later_step_takes_the_name_of_an_earlier_one_whatever_the_two_are(
    tier: Tier, before: int, was_replicated: bool, after: int, is_replicated: bool
) -> None:
    """A job went from one rank to three, or from DDP to FSDP."""
    give_name(tier, step(tier, FIRST, ranks=before, replicated=was_replicated), "last.ckpt")
    assert give_name(tier, step(tier, SECOND, ranks=after, replicated=is_replicated), "last.ckpt")
    assert holder(tier, "last.ckpt") == ("r", 2)
    if is_replicated:
        assert below(tier, "last.ckpt") == ["last.ckpt"]
    else:
        files = [*(f"__{rank}_0.distcp" for rank in range(after)), "manifest.json"]
        assert below(tier, "last.ckpt") == [f"last.ckpt/{file}" for file in files]
        assert all(tier.read(f"last.ckpt/{file}") == tier.read(step_prefix("r", SECOND) + file) for file in files), (
            "files of the earlier step are left"
        )


@pytest.mark.parametrize("at", range(1, 4))
def test_a_sharded_name_that_is_moving_has_no_manifest_and_the_next_try_ends_it(tier: Tier, at: int) -> None:
    """A reader who finds a manifest finds the shards it lists."""
    give_name(tier, step(tier, FIRST, ranks=2, replicated=False), "last.ckpt")
    second = step(tier, SECOND, ranks=2, replicated=False)
    failing = FaultyTier(tier)
    failing.fail("alias", Fault.BUSY, at=at)
    with pytest.raises(TierError):
        give_name(failing, second, "last.ckpt")
    assert "last.ckpt/manifest.json" not in below(tier, "last.ckpt")
    assert give_name(tier, second, "last.ckpt")
    assert tier.read("last.ckpt/manifest.json") == tier.read(step_prefix("r", SECOND) + MANIFEST)


def test_a_sharded_name_loses_what_readers_look_for_before_its_first_shard_changes(tier: Tier) -> None:
    seen = RecordingTier(tier)
    for id in (FIRST, SECOND):
        found = step(tier, id, ranks=2, replicated=False)
        for file in (".metadata", "meta.pt"):
            tier.put_bytes(step_prefix("r", id) + file, b"of the step")
        assert missing_names(tier, dataclasses.replace(found, shards=named(found, "last.ckpt"))) == ["last.ckpt"]
        give_name(seen, found, "last.ckpt")
        assert missing_names(tier, dataclasses.replace(found, shards=named(found, "last.ckpt"))) == []
    changes = [(call.verb, call.key.rpartition("/")[2]) for call in seen.calls("alias", "delete")]
    files = ["__0_0.distcp", "__1_0.distcp", "manifest.json", "meta.pt", ".metadata"]
    given = [("alias", file) for file in files]
    assert changes == [*given, ("delete", ".metadata"), ("delete", "manifest.json"), *given]
    tier.delete("last.ckpt/.metadata")
    assert missing_names(tier, dataclasses.replace(found, shards=named(found, "last.ckpt"))) == ["last.ckpt"]


def named(found: Manifest | UnfinishedStep, name: str) -> tuple[ShardRecord, ...]:
    return tuple(dataclasses.replace(shard, names=(name,)) for shard in found.shards)


def test_a_stock_folder_that_a_sharded_step_takes_the_name_of_is_none_from_the_first_change_on(tier: Tier) -> None:
    for file in (".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"):
        tier.put_bytes(f"last.ckpt/{file}", b"PK of torch")
    assert read_name(tier, "last.ckpt") is None
    seen = RecordingTier(tier)
    assert give_name(seen, step(tier, ranks=2, replicated=False), "last.ckpt")
    assert seen.calls("alias", "delete")[0].key == "last.ckpt/.metadata"
    assert below(tier, "last.ckpt") == [
        f"last.ckpt/{file}" for file in ("__0_0.distcp", "__1_0.distcp", "manifest.json")
    ]


def test_readers_of_a_name_that_moves_always_find_a_whole_step(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "tier", durable=False)
    steps = [step(tier, StepId(number, 1, "0a0b0c")) for number in range(1, 5)]
    give_name(tier, steps[0], "last.ckpt")
    done = threading.Event()

    def read() -> int:
        seen = 0
        while not done.is_set() or not seen:
            found = holder(tier, "last.ckpt")
            assert found is not None and found[1] in range(1, 5)
            assert torch.load(tmp_path / "tier" / "last.ckpt", weights_only=True) == {}
            seen += 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for turn in range(200):
                give_name(tier, steps[turn % 4], "last.ckpt")
        finally:
            done.set()
        assert all(reader.result(60) for reader in readers)


def test_a_stock_file_under_the_name_is_replaced_as_the_stock_class_does(tier: Tier) -> None:
    tier.put_bytes("last.ckpt", b"PK\x03\x04 stock")
    assert give_name(tier, step(tier), "last.ckpt")
    assert holder(tier, "last.ckpt") == ("r", 1)


def test_a_stock_folder_under_the_name_of_a_sharded_step_does_not_stay_in_it(tier: Tier) -> None:
    """Whoever knows only stock folders would go on reading the old checkpoint."""
    for file in (".metadata", "__0_0.distcp", "__11_0.distcp", "meta.pt", "notes.txt"):
        tier.put_bytes(f"last.ckpt/{file}", b"stock")
    give_name(tier, step(tier, ranks=2, replicated=False), "last.ckpt")
    assert [key for key in below(tier, "last.ckpt") if tier.read(key) == b"stock"] == ["last.ckpt/notes.txt"]


@pytest.mark.parametrize("replicated", [True, False])
def test_what_cannot_be_replaced_is_told_and_left(tmp_path: Path, replicated: bool) -> None:
    tier = LocalTier(tmp_path / "tier")
    theirs = "last.ckpt/weights" if replicated else "last.ckpt"
    tier.put_bytes(theirs, b"a stock checkpoint")
    with pytest.raises(TierError, match="move it away") as caught:
        give_name(tier, step(tier, replicated=replicated), "last.ckpt")
    assert not caught.value.retryable and tier.read(theirs) == b"a stock checkpoint"


# -- two runs in one folder -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
def test_a_name_of_another_runs_committed_step_stays_its_own_and_a_warning_says_so(
    tier: Tier, replicated: bool, theirs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the path that run a calls its best model has the weights of run b."""
    assert give_name(tier, step(tier, run="a", replicated=theirs), "best.ckpt")
    before = {key: tier.read(key) for key in below(tier, "best.ckpt")}
    mine = step(tier, SECOND, run="b", replicated=replicated)
    with caplog.at_level(logging.WARNING):
        assert not give_name(tier, mine, "best.ckpt")
        assert not give_name(tier, mine, "best.ckpt")
    assert {key: tier.read(key) for key in below(tier, "best.ckpt")} == before
    (record,) = caplog.records
    assert "'best.ckpt'" in record.message and "run 'a'" in record.message and "run 'b'" in record.message
    assert tier.root in record.message and "different folders" in record.message
    assert give_name(tier, mine, "other.ckpt") and holder(tier, "other.ckpt") == ("b", 2)


def test_a_host_that_has_its_folder_for_itself_leaves_another_runs_name_too(tier: Tier) -> None:
    """There no step has a manifest."""
    found = step(tier, run="a", ranks=1, of=2)
    assert isinstance(found, UnfinishedStep)
    assert give_name(tier, found, "best.ckpt")
    assert not give_name(tier, step(tier, run="b"), "best.ckpt")
    assert holder(tier, "best.ckpt") == ("a", 1)


def test_a_name_whose_step_is_gone_may_be_taken_and_that_is_said(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    """A run that was deleted by hand, or whose deletion was interrupted; or one that has ended and left only its files,
    of which this was one."""
    give_name(tier, step(tier, run="a"), "best.ckpt")
    for info in list(tier.list(step_prefix("a", FIRST))):
        tier.delete(info.key)
    with caplog.at_level(logging.WARNING):
        assert give_name(tier, step(tier, SECOND, run="b"), "best.ckpt")
    assert holder(tier, "best.ckpt") == ("b", 2)
    (record,) = caplog.records
    assert "'best.ckpt'" in record.message and "step 1" in record.message and "run 'a'" in record.message


LATER = (
    Identity(id=FIRST, run="r", rank=0, world_size=1, replicated=True)
    .to_bytes()
    .replace(b'"version":%d' % FORMAT_VERSION, b'"version":9')
)
EARLIER = b'{\n "format": "resiliency-checkpoint",\n "version": 2,\n "run": "a",\n "step": 10\n}'


@pytest.mark.parametrize(("theirs", "version"), [(LATER, 9), (EARLIER, 2)], ids=["later", "earlier"])
def test_a_file_of_another_version_of_the_format_keeps_its_name(
    tier: Tier, theirs: bytes, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier.put_bytes("last.ckpt", theirs)
    with caplog.at_level(logging.WARNING):
        assert not give_name(tier, step(tier), "last.ckpt")
    assert tier.read("last.ckpt") == theirs
    assert delete_names(tier, "r", ["last.ckpt"]) == [] and tier.read("last.ckpt") == theirs
    assert f"has checkpoint format {version}" in caplog.records[0].message


def test_two_jobs_in_one_folder_keep_their_own_files_to_the_end(tmp_path: Path) -> None:
    """Both save under the same names; each loads its own steps, and the first one's file is still its own."""
    folder = tmp_path / "ckpts"
    states = {"a": make_state(1), "b": make_state(2)}
    for run, number in (("a", 10), ("b", 10), ("a", 20), ("b", 20)):
        with make_checkpointer(folder, run=run) as checkpointer:
            ticket = checkpointer.save(number, states[run], names=["last.ckpt", f"{run}-{number}.ckpt"])
            assert ticket is not None
            ticket.wait(Stage.DURABLE)
    tier = LocalTier(folder)
    assert holder(tier, "last.ckpt") == ("a", 20)
    stock = torch.load(folder / "last.ckpt", weights_only=True)
    assert torch.equal(stock["model"]["weight"], states["a"]["model"]["weight"])
    for run in states:
        with make_checkpointer(folder, run=run) as checkpointer:
            restored = checkpointer.load()
            assert restored is not None and restored.step == 20
            assert torch.equal(restored.state["model"]["weight"], states[run]["model"]["weight"])


# -- reading and taking away ------------------------------------------------------------------------------------------


def test_what_is_not_ours_has_no_holder(tier: Tier, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "stock")
    for data in ((tmp_path / "stock").read_bytes(), b"", b"PK", b"{}"):
        tier.put_bytes("last.ckpt", data)
        assert read_name(tier, "last.ckpt") is None
        assert delete_names(tier, "r", ["last.ckpt"]) == []
        assert tier.read("last.ckpt") == data
    assert read_name(tier, "none.ckpt") is None
    tier.put_bytes("folder.ckpt/shard-00000.bin", b"theirs")
    assert read_name(tier, "folder.ckpt") is None and delete_names(tier, "r", ["folder.ckpt"]) == []


def test_a_name_that_cannot_be_read_is_an_error_and_not_nobodys(tier: Tier) -> None:
    give_name(tier, step(tier), "last.ckpt")
    broken = FaultyTier(tier)
    broken.fail("read_range", Fault.BUSY)
    with pytest.raises(TierError):
        read_name(broken, "last.ckpt")
    broken.fail("read_range", Fault.REFUSED)
    with pytest.raises(TierError):
        give_name(broken, step(tier, SECOND, run="b"), "last.ckpt")
    assert holder(tier, "last.ckpt") == ("r", 1)


@pytest.mark.parametrize("replicated", [True, False])
def test_only_names_of_the_run_and_the_step_are_deleted(tier: Tier, replicated: bool) -> None:
    names = ["a.ckpt", "b.ckpt", "c.ckpt"]
    give_name(tier, step(tier, FIRST, ranks=2, replicated=replicated), "a.ckpt")
    give_name(tier, step(tier, SECOND, ranks=2, replicated=replicated), "b.ckpt")
    give_name(tier, step(tier, FIRST, run="another", ranks=2, replicated=replicated), "c.ckpt")
    assert delete_names(tier, "r", names, step=FIRST) == ["a.ckpt"]
    assert [holder(tier, name) for name in names] == [None, ("r", 2), ("another", 1)]
    assert delete_names(tier, "r", [*names, "never.ckpt"]) == ["b.ckpt"]
    assert [holder(tier, name) for name in names] == [None, None, ("another", 1)]


@pytest.mark.parametrize("at", range(1, 5))
def test_a_deletion_of_a_sharded_name_cut_anywhere_is_finished_by_the_next(tier: Tier, at: int) -> None:
    give_name(tier, step(tier, ranks=3, replicated=False), "a.ckpt")
    dying = FaultyTier(tier)
    dying.fail("delete", Fault.REFUSED, at=at)
    with pytest.raises(TierError):
        delete_names(dying, "r", ["a.ckpt"])
    assert at == 1 or "a.ckpt/manifest.json" not in below(tier, "a.ckpt")
    assert delete_names(tier, "r", ["a.ckpt"]) == ["a.ckpt"]
    assert below(tier, "a.ckpt") == []


def test_a_deleted_name_leaves_the_step_and_a_deleted_step_leaves_a_copy_of_the_name(tmp_path: Path) -> None:
    """A user's own hard link or copy of the file is a checkpoint of its own."""
    tier = LocalTier(tmp_path / "tier")
    found = step(tier)
    give_name(tier, found, "last.ckpt")
    os.link(tier.path("last.ckpt"), tmp_path / "mine.ckpt")
    assert delete_names(tier, "r", ["last.ckpt"]) == ["last.ckpt"]
    assert tier.read(step_prefix("r", FIRST) + "shard-00000.shard")
    for info in list(tier.list("")):
        tier.delete(info.key)
    assert torch.load(tmp_path / "mine.ckpt", weights_only=True) == {}
