"""A sharded step where each host has a folder of its own: each rank reads what it wants, from its host's files and from
the slower tier, and nothing else."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from resiliency.checkpoint import shard_assembler, shard_plan, shard_reader
from resiliency.checkpoint.checkpointer import Checkpointer, Restored
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.read_plan import Read, plan_reads
from resiliency.checkpoint.shard_reader import RangeReader
from resiliency.errors import CorruptShard, TierError
from resiliency.events import Event, EventKind
from resiliency.inspection.by_path import locate_and_load
from resiliency.storage.catalog import read_manifest, step_prefix
from resiliency.storage.shard_file import Chunk
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    QUICK,
    RUN,
    copy_to_memory,
    differences,
    flip_bits,
    make_checkpointer,
    save_steps,
    step_dir,
    step_dirs,
)
from tests.checkpoint.gloo_ranks import run_gloo

SOON = timedelta(seconds=30)
ROWS = 1 << 10
#: 1 MiB each. Of the plain ones, which rank 0 writes, every rank wants all.
LARGE = ("a", "b", "c", "d")


def whole(step: int) -> dict[str, torch.Tensor]:
    """By key: large tensors to be sharded, and a small plain one beside each."""
    made = torch.Generator().manual_seed(step)
    large = {f"{key}.large": torch.randn(ROWS, 256, generator=made) for key in LARGE}
    return {**large, **{f"{key}.step": torch.tensor([float(step)]) for key in LARGE}}


def state(step: int, *, value: bool = True, placement: Any = None) -> dict[str, Any]:
    """The tensors as this rank holds them; without ``value`` zeros."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    made: dict[str, Any] = {}
    for key, tensor in whole(step).items():
        tensor = tensor if value else torch.zeros_like(tensor)
        placements = [placement or Shard(0)]
        made[key] = distribute_tensor(tensor, mesh, placements, src_data_rank=None) if "large" in key else tensor
    return made


def is_whole(found: dict[str, Any], step: int) -> bool:
    return all(
        torch.equal(getattr(found[key], "full_tensor", lambda tensor=found[key]: tensor)(), tensor)
        for key, tensor in whole(step).items()
    )


class Heard(logging.Handler):
    """What a rank was told: warnings, and events."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.events: list[Event] = []

    def emit(self, record: logging.LogRecord | Event) -> None:  # type: ignore[override]
        if isinstance(record, Event):
            self.events.append(record)
        else:
            self.lines.append(record.getMessage())

    def close(self) -> None: ...


def host_of(rank: int) -> int:
    """Two hosts, or one for a job of one rank."""
    return rank * 2 // torch.distributed.get_world_size()


def checkpointer_on(root: str, rank: int, *, store: str | None = "store", heard: Heard | None = None) -> Checkpointer:
    """Each host has ``host0`` or ``host1`` below ``root`` for itself, and ``store`` is common."""
    os.environ["RESILIENCY_NODE"] = f"host{host_of(rank)}"
    if heard is not None:
        logging.getLogger("resiliency").addHandler(heard)
    return Checkpointer(
        LocalTierOptions(directory=f"{root}/host{host_of(rank)}", keep=None),
        run=RUN,
        options=QUICK,
        remotes=[RemoteTierOptions(address=f"{root}/{store}", keep=None)] if store else [],
        sinks=[heard] if heard is not None else [],
    )


def save(rank: int, root: str, steps: Sequence[int], store: str | None = "store") -> None:
    shard_plan.BLOCK_BYTES = 16 * 1024
    with checkpointer_on(root, rank, store=store) as checkpointer:
        for step in steps:
            ticket = checkpointer.save(step, {"m": state(step)}, per_rank={"rank": rank})
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
            assert checkpointer.flush(Stage.DURABLE, timeout=SOON)


def answer(root: str, rank: int, text: object) -> None:
    Path(root, f"answer-{rank:03d}").write_text(str(text))


def answers(root: Path) -> list[str]:
    return [path.read_text() for path in sorted(root.glob("answer-*"))]


def load(rank: int, root: str, step: int, store: str | None = "store") -> None:
    """Loads into live tensors; answers with the bytes read for each byte that this rank has, and those from the store."""
    heard, into = Heard(), state(step, value=False)
    addresses = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)().data_ptr() for tensor in into.values()]
    checkpointer = checkpointer_on(root, rank, store=store, heard=heard)
    try:
        with pytest.MonkeyPatch.context() as patch:
            stored, read = [0], LocalTier.read_range

            def counted(tier: LocalTier, key: str, start: int, end: int) -> bytes:
                stored[0] += end - start
                return read(tier, key, start, end)

            patch.setattr(LocalTier, "read_range", counted)
            restored = checkpointer.load(into={"m": into})
        assert restored is not None and restored.step == step
        assert is_whole(into, step) and restored.per_rank in (None, {"rank": rank})
        held = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in into.values()]
        assert [tensor.data_ptr() for tensor in held] == addresses
        assert not [event for event in heard.events if event.kind == EventKind.CHECKPOINT_REPAIRED]
        answer(root, rank, restored.nbytes / sum(tensor.nbytes for tensor in held))
        answer(root, rank + 200, stored[0] / sum(tensor.nbytes for tensor in held))
        answer(root, rank + 100, "\n".join(line for line in heard.lines if "digests" in line or "missing" in line))
    finally:
        checkpointer.close(flush=False)


def files(root: Path) -> list[str]:
    """What the hosts' folders hold of steps."""
    return sorted(str(path.relative_to(root)) for path in root.glob("host*/.resiliency/*/steps/*/*"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two hosts with a rank each, also in the store."""
    root = tmp_path_factory.mktemp("pristine")
    run_gloo(2, save, str(root), (1, 2))
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "root")
    return tmp_path / "root"


def test_each_rank_reads_what_it_wants_and_no_host_gets_the_files_of_another(root: Path) -> None:
    before = files(root)
    assert not [name for name in before if "host1" in name and "__0_0" in name]
    run_gloo(2, load, str(root), 2)
    assert [name for name in files(root) if name.endswith(".distcp")] == [
        name for name in before if name.endswith(".distcp")
    ]
    assert max(map(float, answers(root)[:2])) < 1.1, "also plain tensors of rank 0"
    assert max(map(float, answers(root)[-2:])) < 0.1, "the rest is read where it is"


def test_hosts_that_have_lost_their_folders_read_the_store(root: Path) -> None:
    for host in ("host0", "host1"):
        shutil.rmtree(root / host)
    run_gloo(2, load, str(root), 2)
    assert max(map(float, answers(root)[:2])) < 1.1
    assert not [name for name in files(root) if name.endswith(".distcp")]


def test_two_ranks_go_on_as_four_and_four_as_two(root: Path, tmp_path: Path) -> None:
    run_gloo(4, load, str(root), 2)
    assert max(map(float, answers(root)[:4])) < 1.2
    more = tmp_path / "more"
    run_gloo(4, save, str(more), (1,))
    run_gloo(2, load, str(more), 1)
    assert max(map(float, answers(more)[:2])) < 1.2


def load_whole(rank: int, root: str, step: int) -> None:
    """As under DDP: into plain tensors of every rank, and into new ones."""
    into = {key: torch.zeros_like(tensor) for key, tensor in whole(step).items()}
    checkpointer = checkpointer_on(root, rank)
    try:
        for restored in (checkpointer.load(into={"m": into}), checkpointer.load()):
            assert restored is not None and restored.step == step and is_whole(restored.state["m"], step)
        assert is_whole(into, step)
    finally:
        checkpointer.close(flush=False)


def test_plain_tensors_are_filled_from_a_sharded_step(root: Path) -> None:
    run_gloo(2, load_whole, str(root), 2)


def shard_of(folder: Path, rank: int, step: int) -> Path:
    return step_dir(folder, RUN, step) / f"__{rank}_0.distcp"


def test_damage_in_one_folder_means_the_store_for_that_shard_and_is_said_once(root: Path) -> None:
    path = shard_of(root / "host0", 0, 2)
    flip_bits(path, [(path.stat().st_size // 2, path.stat().st_size // 2 + 1)])
    run_gloo(4, load, str(root), 2)  # two of them read that folder
    said = "\n".join(answers(root)[4:8]).split("\n")
    assert [line for line in said if line] == [line for line in said if str(path) in line] and "digests" in said[0]
    assert len([line for line in said if line]) == 1


def test_a_shard_that_is_nowhere_whole_means_the_step_before_for_all_ranks(root: Path) -> None:
    shard_of(root / "store", 0, 2).unlink()
    run_gloo(2, load, str(root), 1)
    assert [line for line in answers(root)[2:4] if "__0_0.distcp" in line], "it is named"


def test_a_file_of_the_store_that_vanishes_after_the_listing_means_the_step_before(root: Path) -> None:
    run_gloo(2, load_while_it_vanishes, str(root))


def load_while_it_vanishes(rank: int, root: str) -> None:
    listed = LocalTier.list

    def vanishes(tier: LocalTier, prefix: str) -> Any:
        found = list(listed(tier, prefix))
        if tier.root == f"{root}/store":
            shard_of(Path(root, "store"), 1, 2).unlink(missing_ok=True)
        return iter(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTier, "list", vanishes)
        load(rank, root, 1)


def load_nothing(rank: int, root: str) -> None:
    checkpointer = checkpointer_on(root, rank, store=None)
    into = state(1, value=False)
    try:
        with pytest.raises(TierError) as caught:
            checkpointer.load(into={"m": into})
        answer(root, rank, caught.value)
        assert all(
            not bool(getattr(tensor, "to_local", lambda tensor=tensor: tensor)().any()) for tensor in into.values()
        )
    finally:
        checkpointer.close(flush=False)


def test_without_a_common_tier_the_error_says_what_is_where(root: Path) -> None:
    run_gloo(2, load_nothing, str(root))
    for said in answers(root):
        for rank in (0, 1):
            folder = step_dir(root / f"host{rank}", RUN, 2)
            assert f"shards {rank} in {folder}/ of host{rank}" in said
        assert "dirpath=" in said


def test_a_store_that_is_no_folder_is_read_by_ranges_too(root: Path) -> None:
    """By a single rank, because memory is of one process."""
    address = copy_to_memory(root / "store")
    remote = RemoteTierOptions(address=address, keep=None)
    with make_checkpointer(root / "new", remotes=[remote]) as checkpointer:
        restored = checkpointer.load()
    assert restored is not None and is_whole(restored.state["m"], 2)
    found = locate_and_load(address)
    assert found is not None and is_whole(found[1]["m"], 2)


# ---- one process


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of six shards of 22 blocks."""
    folder = tmp_path_factory.mktemp("flat")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_plan, "BLOCK_BYTES", 64 * 1024)
        save_steps(folder, 1, world_size=6, sharded=True)
    return folder


def load_flat(folder: Path, *, options: CheckpointerOptions = QUICK, **ways: Any) -> Restored:
    with make_checkpointer(folder, options=options) as checkpointer:
        restored = checkpointer.load(**ways)
    assert restored is not None
    return restored


def test_of_many_shards_only_some_files_are_open_at_once(flat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    read = shard_assembler.ShardAssembler.read

    def count(self: Any, *, threads: int) -> Any:
        open_files = [_target(fd) for fd in os.listdir("/proc/self/fd")]
        opened.append(sum(path.startswith(f"{flat}/") and ".distcp" in path for path in open_files))
        return read(self, threads=threads)

    monkeypatch.setattr(shard_assembler.ShardAssembler, "read", count)
    options = replace(QUICK, agent="process")  # an embedded one looks into files meanwhile, too
    wanted = load_flat(flat, options=options).state
    monkeypatch.setattr("resiliency.checkpoint.shard_access.MAX_OPEN_FILES", 5)
    assert differences(load_flat(flat, options=options).state, wanted) == []
    assert opened == [6, 0]
    assert shard_reader.MAX_OPEN_FILES <= 256


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.parametrize("staged", [1, 2_000_000, 1 << 30])
def test_converted_tensors_are_staged_a_part_at_a_time(
    flat: Path, monkeypatch: pytest.MonkeyPatch, staged: int
) -> None:
    monkeypatch.setattr(shard_assembler, "_STAGED_BYTES", staged)
    wanted = {key: value for key, value in load_flat(flat).state.items() if isinstance(value, torch.Tensor)}
    into = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in wanted.items()}
    into["state_dict/head.weight"] = torch.zeros_like(wanted["state_dict/head.weight"])  # goes straight to its place
    restored = load_flat(flat, reads=lambda stored: plan_reads(into, stored))
    assert all(torch.equal(into[key], wanted[key].to(into[key].dtype)) for key in wanted)
    assert restored.nbytes < 1.6 * sum(value.nbytes for value in wanted.values())


def test_no_byte_of_a_damaged_block_of_a_tier_reaches_a_tensor(flat: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(flat, folder)
    (step,) = step_dirs(folder)
    tier = LocalTier(folder)
    record = read_manifest(tier, RUN, step).shards[2]
    reader = RangeReader(tier, step_prefix(RUN, step) + record.file, record)
    path = shard_of(folder, 2, 1)
    start, end = record.blocks.bounds(20)
    good = path.read_bytes()
    target = torch.zeros(end - start, dtype=torch.uint8)
    segment = shard_reader.ByteRange(start, end - start, target.data_ptr())
    flip_bits(path, [(end - 1, end)])
    with pytest.raises(CorruptShard, match=path.name) as caught:
        reader.read_block(20, [segment])
    assert caught.value.ranges == ((start, end),) and not target.any()
    path.write_bytes(good)
    assert reader.read_block(20, [segment]) and bytes(target.tolist()) == good[start:end]


def test_of_a_converted_box_only_its_rows_are_read(flat: Path) -> None:
    whole_tensor = load_flat(flat).state["state_dict/big"]
    into = torch.zeros(3, 1000, dtype=torch.float64)

    def reads(stored: Sequence[Chunk]) -> list[Read]:
        chunk = next(one for one in stored if one.key.endswith("big") and one.offsets[0] == 350)
        return [Read(chunk.key, chunk.offsets, (200, 7), (3, 1000), into)]

    restored = load_flat(flat, reads=reads)
    assert torch.equal(into, whole_tensor[550:553, 7:1007].double())
    assert restored.nbytes < 350 * 1024 * 4 / 4
