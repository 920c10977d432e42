"""Bytes go where they belong while they are checked: any cut into segments, gaps and blocks, and any damage."""

from __future__ import annotations

import itertools
import os
import threading
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.checkpoint import shard_assembler, shard_plan, stored_state
from resiliency.checkpoint import shard_reader as reading
from resiliency.checkpoint.read_plan import ReadPlanner, plan_into, plan_new
from resiliency.checkpoint.shard_assembler import ShardAssembler, _by_block
from resiliency.checkpoint.shard_reader import ByteRange, ShardReader, shard_reader
from resiliency.errors import ConfigError, CorruptShard
from resiliency.state.unpickle import unpickle
from resiliency.storage.blocks import block_digest
from resiliency.storage.catalog import read_record
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, bytes_of, differences, make_checkpointer, step_dirs

SETTINGS = settings(deadline=None, database=None, max_examples=80, suppress_health_check=list(HealthCheck))
NBYTES, BLOCK = 1000, 300


class Raw(ShardReader):
    """A reader of a file that is no shard: blocks of 300 bytes, no directory."""

    def _open(self) -> None:
        import ctypes
        import mmap

        self._map = mmap.mmap(self._fd, NBYTES, access=mmap.ACCESS_COPY)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ShardRecord, dict[str, torch.Tensor]]:
    """A shard of many small blocks, none of which holds two things; its record is the agent's."""
    monkeypatch.setattr(shard_plan, "BLOCK_BYTES", 64)
    monkeypatch.setattr(shard_plan, "_MIN_BLOCK", 64)
    state = {
        "a": torch.randn(40, 7),
        "b": torch.arange(5, 105),
        "c": torch.randn(3, 5).t().contiguous(),
        "d": torch.ones(9, dtype=torch.bfloat16),
    }
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, state, per_rank={"rng": torch.arange(100)})
        assert ticket is not None
        ticket.wait(Stage.DURABLE)
    (step,) = step_dirs(tmp_path)
    return tmp_path, read_record(LocalTier(tmp_path), RUN, step, 0), state


cuts = st.lists(st.tuples(st.integers(0, NBYTES - 1), st.integers(1, 400)), max_size=6)


@SETTINGS
@given(cuts=cuts, stride=st.integers(1, 350), most_targets=st.integers(1, 4), most_bytes=st.integers(1, 400))
def test_segments_of_any_place_and_overlap_are_read_right(
    tmp_path_factory: pytest.TempPathFactory,
    cuts: list[tuple[int, int]],
    stride: int,
    most_targets: int,
    most_bytes: int,
) -> None:
    """Overlapping ones too: two destinations may want the same bytes. A system call may read less than it was asked
    for."""
    real = os.preadv

    def read_some(fd: int, targets: Sequence[bytearray | memoryview], at: int) -> int:
        assert len(targets) <= most_targets
        starts = itertools.accumulate(map(len, targets), initial=0)
        some = [memoryview(one)[: max(0, most_bytes - start)] for one, start in zip(targets, starts, strict=False)]
        return real(fd, some, at)

    data = os.urandom(NBYTES)
    path = tmp_path_factory.mktemp("raw") / "file"
    path.write_bytes(data)
    record = record_of(data)
    targets = [torch.zeros(min(length, NBYTES - start), dtype=torch.uint8) for start, length in cuts]
    segments = [
        ByteRange(start, len(target), target.data_ptr()) for (start, _), target in zip(cuts, targets, strict=True)
    ]
    reader = Raw(str(path), record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_STRIDE", stride)
        patch.setattr(reading, "_MAX_TARGETS", most_targets)
        patch.setattr(os, "preadv", read_some)
        for block, inside in _by_block(record.blocks, segments, [(0, NBYTES)]):
            assert reader.read_block(block, inside)
    reader.close()
    for (start, _), target in zip(cuts, targets, strict=True):
        assert bytes(target.tolist()) == data[start : start + len(target)]


def record_of(data: bytes) -> ShardRecord:
    record = ShardRecord.__new__(ShardRecord)
    for name, value in (("nbytes", NBYTES), ("block_bytes", BLOCK), ("sections", ())):
        object.__setattr__(record, name, value)
    object.__setattr__(record, "digests", tuple(block_digest(data[at : at + BLOCK]) for at in range(0, NBYTES, BLOCK)))
    return record


@pytest.mark.parametrize("wanted", [True, False])
def test_a_file_that_is_cut_meanwhile_is_damaged_whatever_the_memory_holds(tmp_path: Path, wanted: bool) -> None:
    """Memory that was not written may hold what the file once had."""
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    segments = [ByteRange(0, NBYTES, target.data_ptr())] if wanted else []
    reader = Raw(str(path), record_of(bytes(NBYTES)))
    assert shard_assembler._read_and_check(reader, 1, segments)
    os.truncate(path, BLOCK + 10)
    assert shard_assembler._read_and_check(reader, 0, segments)
    assert not shard_assembler._read_and_check(reader, 1, segments)
    reader.close()


def test_into_tensors_of_every_layout(saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]]) -> None:
    folder, record, state = saved
    into = {
        "a": torch.zeros(7, 40).t(),
        "b": torch.zeros(100, dtype=torch.int64),
        "c": torch.zeros(5, 3),
        "d": torch.zeros(9),
    }
    versions = {key: tensor._version for key, tensor in into.items()}
    reader = shard_reader(LocalTier(folder), RUN, record)
    one = assembler(reader, plan_into(into))
    assert one.read(threads=3) == {}
    _, own = one.result()
    reader.close()
    assert all(torch.equal(into[key], state[key].to(into[key].dtype)) for key in state)
    assert torch.equal(own["rng"], torch.arange(100))
    assert all(tensor._version > versions[key] for key, tensor in into.items()), "autograd would not notice"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_all_threads_read(
    saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    folder, record, _ = saved
    reader = shard_reader(LocalTier(folder), RUN, record)
    one, real, used, meet = (
        assembler(reader, plan_new()),
        shard_assembler._read_and_check,
        set(),
        threading.Barrier(threads),
    )

    def is_good(*args: Any) -> bool:
        if threading.current_thread() not in used:
            used.add(threading.current_thread())
            meet.wait(10)
        return real(*args)

    monkeypatch.setattr(shard_assembler, "_read_and_check", is_good)
    assert one.read(threads=threads) == {} and len(used) == threads and threading.current_thread() in used
    reader.close()


@pytest.mark.parametrize("fails_here", [True, False])
def test_what_any_thread_raises_is_heard(
    saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, fails_here: bool
) -> None:
    """It is not damage, which another copy would be read for."""
    folder, record, _ = saved
    reader = shard_reader(LocalTier(folder), RUN, record)
    one, real, here, gone = (
        assembler(reader, plan_new()),
        shard_assembler._read_and_check,
        threading.current_thread(),
        threading.Event(),
    )

    def broken(*args: Any) -> bool:
        if (threading.current_thread() is here) is fails_here:
            gone.set()
            raise MemoryError("no more")
        assert gone.wait(10)
        return real(*args)

    monkeypatch.setattr(shard_assembler, "_read_and_check", broken)
    with pytest.raises(MemoryError, match="no more"):
        one.read(threads=2)
    reader.close()


def assembler(reader: ShardReader, planner: ReadPlanner | None) -> ShardAssembler:
    return ShardAssembler({0: reader}, rank=0, planner=planner, allow_pickle=False)


def place_of(reader: ShardReader, tensor: torch.Tensor) -> tuple[int, int]:
    """Where the bytes of a tensor are in the file."""
    data, wanted = Path(reader.path).read_bytes(), bytes_of(tensor)
    assert data.count(wanted) == 1
    return data.index(wanted), data.index(wanted) + len(wanted)


def damage(path: str, at: int) -> None:
    with open(path, "r+b") as file:  # in place: the file may be mapped
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("into", ["new", "plain", "odd"])
@pytest.mark.parametrize("where", ["a", "b", "c", "d"])
def test_damage_anywhere_is_found(
    saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]], where: str, into: str
) -> None:
    folder, record, state = saved
    targets = {
        "new": None,
        "plain": {key: torch.zeros_like(tensor) for key, tensor in state.items()},
        "odd": {key: torch.zeros(2 * len(tensor), *tensor.shape[1:])[::2] for key, tensor in state.items()},
    }[into]
    reader = shard_reader(LocalTier(folder), RUN, record)
    start, end = place_of(reader, state[where])
    one = assembler(reader, None if targets is None else plan_into(targets))
    for at in (start, (start + end) // 2, end - 1):
        damage(reader.path, at)
        blocks = reader.record.blocks
        assert one.read(threads=1)[0].ranges == (blocks.bounds(blocks.index_at(at)),)
        damage(reader.path, at)
    assert one.read(threads=1) == {}
    reader.close()


@pytest.mark.parametrize("back", [1, 20, 60, 200, 500, 900])
def test_a_damaged_end_is_not_even_parsed(saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]], back: int) -> None:
    """The directory, the pickle and what is of this rank alone."""
    folder, record, _ = saved
    reader = shard_reader(LocalTier(folder), RUN, record)
    path, blocks, at = reader.path, record.blocks, record.nbytes - back
    reader.close()
    assert at >= record.sections[-1]
    damage(path, at)
    with pytest.raises(CorruptShard, match=r"do not match their digests") as caught:
        shard_reader(LocalTier(folder), RUN, record)
    assert caught.value.ranges == (blocks.bounds(blocks.index_at(at)),)


def test_every_flipped_byte_of_a_file_is_noticed(saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]]) -> None:
    """Headers of storages too: nothing of ours goes by them, but torch does."""
    folder, record, _ = saved
    path = shard_reader(LocalTier(folder), RUN, record).path
    unnoticed = []
    for at in range(record.nbytes):
        damage(path, at)
        try:
            reader = shard_reader(LocalTier(folder), RUN, record)
            try:
                if not assembler(reader, None).read(threads=1):
                    unnoticed.append(at)
            finally:
                reader.close()
        except CorruptShard:
            continue
        finally:
            damage(path, at)
    assert unnoticed == []


def test_what_nobody_wants_is_not_read(saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]]) -> None:
    folder, record, state = saved
    reader = shard_reader(LocalTier(folder), RUN, record)
    a, b = (place_of(reader, state[key]) for key in "ab")
    damage(reader.path, sum(a) // 2)
    one = assembler(reader, plan_new(lambda key: key == "b"))
    assert one.read(threads=2) == {}
    assert torch.equal(one.result()[0]["b"], state["b"])
    damage(reader.path, sum(b) // 2)
    assert list(one.read(threads=2)) == [0]
    reader.close()


def test_a_disk_that_fails_is_damage_and_no_end(
    saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, record, _ = saved
    reader = shard_reader(LocalTier(folder), RUN, record)
    one = assembler(reader, plan_new())

    def fails(fd: int, buffers: object, at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    bad = one.read(threads=1)[0]
    assert isinstance(bad, CorruptShard) and len(bad.ranges) > 20
    assert "cannot be read at bytes (" in caplog.text
    reader.close()


@pytest.mark.parametrize(("extra", "times"), [({}, 0), ({"object": Path("x")}, 2)], ids=["plain", "with an object"])
def test_a_plain_structure_is_not_unpickled_to_fill_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], times: int
) -> None:
    """An object may look at the values of its tensors while it is made, so it is made again when they are there."""
    state = {"a": torch.arange(5.0), "b": [torch.ones(3), {"c": 1}], **extra}
    calls = []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return unpickle(*arguments, **named)

    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.flush()
        monkeypatch.setattr(stored_state, "unpickle", counted)
        into = {"a": torch.zeros(5), "b": [torch.zeros(3), {"c": 0}], **extra}
        restored = checkpointer.load(into=into)
    assert restored is not None and differences(restored.state, state) == []
    assert torch.equal(into["a"], state["a"])
    assert len(calls) == times


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Tensors of all kinds that are plain, some of them tied, or views of one storage, or out of reach of keys."""
    base = torch.arange(24.0)
    makers = [
        lambda: torch.arange(draw(st.integers(0, 5)), dtype=draw(st.sampled_from([torch.int64, torch.bfloat16]))),
        lambda: base[draw(st.integers(0, 20)) :],
        lambda: base.view(4, 6).t(),
        lambda: base.view(2, 3, 4)[:, 1],
        lambda: torch.nn.Parameter(torch.ones(draw(st.integers(1, 3)), 2)),
        lambda: torch.tensor(3.0).expand(2, 3),
        lambda: torch.empty(0, 3),
        lambda: torch.ones(3).as_strided((0, 2), (2, 1), 100),
        lambda: torch.tensor(draw(st.booleans())),
    ]
    tensors = [draw(st.sampled_from(makers))() for _ in range(draw(st.integers(1, 4)))]
    leaf = st.one_of(st.sampled_from(tensors), st.integers(), st.text(max_size=2))
    tree = draw(st.dictionaries(st.text(max_size=2), st.one_of(leaf, st.lists(leaf, max_size=3)), max_size=5))
    if draw(st.booleans()):
        tree["storage"] = tensors[0].untyped_storage() if draw(st.booleans()) else tensors[0].storage()
    if draw(st.booleans()):
        tree["ordered"] = OrderedDict(a=tensors[-1])
        if draw(st.booleans()):
            tree["ordered"].hidden = tensors[0]
    return tree


@settings(SETTINGS, max_examples=40)
@given(trees())
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_where_tensors_are_is_the_same_with_and_without_making_them(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("step")
    with make_checkpointer(path) as checkpointer:
        ticket = checkpointer.save(1, {"t": torch.zeros(1), **tree})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
    (step,) = step_dirs(path)
    reader = shard_reader(LocalTier(path), RUN, read_record(LocalTier(path), RUN, step, 0))
    described, made = (stored_state.ReplicatedState(reader, allow_pickle=True) for _ in range(2))
    assert described.place() == made._place_any()
    leaves = {key: object() for key in made.place()[0]}
    trees = [state.with_leaves(leaves, partial=True) for state in (described, made)]
    for each in trees:
        each.pop("storage", None)  # without values
    assert repr(trees[0]) == repr(trees[1])
    reader.close()


@pytest.mark.parametrize("extra", [{}, {"object": Path("x")}], ids=["plain", "with an object"])
def test_an_empty_view_that_begins_behind_its_storage_is_no_damage(tmp_path: Path, extra: dict[str, Any]) -> None:
    state = {"a": torch.ones(2), "none": torch.ones(3).as_strided((0, 2), (2, 1), 100), **extra}
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, state)
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
        into = {"a": torch.zeros(2), "none": torch.empty(0, 2), **extra}
        restored = checkpointer.load(into=into)
    assert restored is not None and torch.equal(into["a"], state["a"]) and restored.state["none"].shape == (0, 2)


def _with_attribute(tensor: torch.Tensor) -> OrderedDict[str, Any]:
    attributes: OrderedDict[str, Any] = OrderedDict()
    attributes.__dict__["seen"] = [tensor]
    return attributes


@pytest.mark.parametrize("extra", [{}, {"bytes": b"not plain"}], ids=["plain", "not plain"])
@pytest.mark.parametrize(
    ("place", "found"),
    [
        (lambda tensor: {tensor: 0.1}, lambda held: next(iter(held))),
        (lambda tensor: {(tensor, 1): 0.1}, lambda held: next(iter(held))[0]),
        (_with_attribute, lambda held: held.__dict__["seen"][0]),
    ],
    ids=["key", "within a key", "attribute"],
)
def test_a_tensor_that_is_also_a_key_or_an_attribute_comes_back_there_too(
    tmp_path: Path, place: Callable[[torch.Tensor], Any], found: Callable[[Any], Any], extra: dict[str, Any]
) -> None:
    tensor = torch.randn(100)
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, {"a": tensor, "held": place(tensor), **extra})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
        restored = checkpointer.load(into={"a": torch.zeros(100), "held": {}, **extra})
    assert restored is not None and torch.equal(restored.state["a"], tensor)
    there = found(restored.state["held"])
    assert isinstance(there, torch.Tensor) and torch.equal(there, tensor)


_COMPLEX = torch.complex(torch.arange(12.0), -torch.arange(12.0)).view(4, 3)
_VIEWS = {
    "conjugate": lambda: _COMPLEX.clone().conj(),
    "conjugate transpose": lambda: _COMPLEX.clone().mH,
    "part of a conjugate": lambda: _COMPLEX.clone().conj()[1:3, ::2],
    "imaginary part of a conjugate": lambda: _COMPLEX.clone().conj().imag,
    "negative": lambda: torch._neg_view(torch.arange(5.0)),
    "empty conjugate": lambda: torch.empty((0, 3), dtype=torch.complex64).conj(),
}
_TARGETS = {
    "plain": lambda zeros: zeros,
    "negative": torch._neg_view,
    "conjugate": lambda zeros: zeros.conj() if zeros.is_complex() else torch._neg_view(zeros),
}


@pytest.mark.parametrize("stored", _VIEWS)
def test_lazy_conjugates_and_negatives_are_loaded_into_tensors_with_and_without_such_a_view(
    tmp_path: Path, stored: str
) -> None:
    tensor, other = _VIEWS[stored](), torch.arange(3.0)
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, {"x": tensor, "w": other})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
        chosen = checkpointer.load(keys=lambda key: key == "x")
        assert chosen is not None and torch.equal(chosen.state["x"], tensor)
        for make in _TARGETS.values():
            target = make(torch.zeros(tensor.shape, dtype=tensor.dtype))
            into = {"x": target, "w": torch.zeros(3)}
            restored = checkpointer.load(into=into)
            assert restored is not None and torch.equal(into["w"], other)
            assert torch.equal(target, tensor) and torch.equal(restored.state["x"], tensor)


@pytest.mark.parametrize("target", ["negative", "conjugate"])
def test_a_plain_tensor_is_loaded_into_a_lazy_view(tmp_path: Path, target: str) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, {"x": _COMPLEX.clone()})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
        into = {"x": _TARGETS[target](torch.zeros_like(_COMPLEX))}
        checkpointer.load(into=into)
    assert torch.equal(into["x"], _COMPLEX)


@pytest.mark.parametrize(
    ("own", "loads"),
    [
        ({"rng": torch.arange(100), "tied": [torch.ones(3)] * 2, "x": (1, None), "none": torch.empty(0)}, 0),
        ({"when": timedelta(seconds=3), "rng": torch.arange(100)}, 1),
    ],
    ids=["plain", "objects"],
)
def test_a_plain_state_of_a_rank_is_read_without_torchs_slower_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], loads: int
) -> None:
    calls: list[Any] = []
    real = torch.load
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, {"a": torch.ones(3)}, per_rank=own)
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
        monkeypatch.setattr(torch, "load", lambda *given, **how: calls.append(given) or real(*given, **how))
        restored = checkpointer.load()
    assert restored is not None and differences(restored.per_rank, own) == [] and len(calls) == loads


def test_a_large_state_of_a_rank_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the bytes of the file into the tensor: its gradients are there when a step is cut in two."""
    nbytes = 16 << 20
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, {}, per_rank={"grad": torch.ones(nbytes, dtype=torch.uint8)})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
    (step,) = step_dirs(tmp_path)
    reader = shard_reader(LocalTier(tmp_path), RUN, read_record(LocalTier(tmp_path), RUN, step, 0))
    data = reader.entry("resiliency/rank.pt")
    monkeypatch.setattr(reader, "entry", lambda name: data)
    tracemalloc.start()  # does not count what torch allocates
    try:
        own = stored_state.load_rank_state(reader, allow_pickle=False)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        reader.close()
    assert int(own["grad"].sum()) == nbytes and most < nbytes / 4


@pytest.mark.parametrize(
    ("into", "told"), [(None, "cannot be read: "), ({"a": 1}, "cannot be read into what was passed: ")]
)
def test_an_error_while_reading_names_only_what_was_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, into: Any, told: str
) -> None:
    def fail(*given: Any, **how: Any) -> Any:
        raise MemoryError("no memory")

    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, {"a": 1})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
        monkeypatch.setattr(shard_assembler, "ReplicatedState", fail)
        with pytest.raises(ConfigError, match=f"{told}MemoryError: no memory"):
            checkpointer.load(into=into)


def test_a_rank_that_may_start_no_thread_reads_alone(
    saved: tuple[Path, ShardRecord, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record, state = saved
    start = threading.Thread.start
    left = [1]

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("resiliency-read"):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for left[0] in (0, 1):
        reader = shard_reader(LocalTier(folder), RUN, record)
        try:
            one = ShardAssembler({0: reader}, rank=0, planner=plan_new(), allow_pickle=False)
            assert one.read(threads=3) == {} and differences(one.result()[0], state) == []
        finally:
            reader.close()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_no_more_threads_are_started_than_there_are_blocks_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, {"a": torch.arange(150.0)})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
    (step,) = step_dirs(tmp_path)
    reader = shard_reader(LocalTier(tmp_path), RUN, read_record(LocalTier(tmp_path), RUN, step, 0))
    blocks: list[int] = []
    started: list[Any] = []
    read_and_check, submit = shard_assembler._read_and_check, shard_assembler.ThreadPoolExecutor.submit
    monkeypatch.setattr(
        shard_assembler, "_read_and_check", lambda r, block, s: blocks.append(block) or read_and_check(r, block, s)
    )
    monkeypatch.setattr(
        shard_assembler.ThreadPoolExecutor, "submit", lambda *given: started.append(given) or submit(*given)
    )
    try:
        one = ShardAssembler({0: reader}, rank=1, planner=plan_new(), allow_pickle=False)
        assert one.read(threads=threads) == {} and differences(one.result()[0], {"a": torch.arange(150.0)}) == []
    finally:
        reader.close()
    assert len(blocks) == 2 and len(started) == min(threads, 2) - 1  # the calling thread reads, too
