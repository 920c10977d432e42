"""Whatever happens to the files of a checkpoint: it is restored bit for bit, or refused; never loaded wrong.

Bits flipped, shard truncated, file missing, manifest missing, files exchanged between steps, ranks, runs and tiers,
JSON with other values in it: the next start gets a step that was saved, every rank the same one, or an error that
names a file that is really bad.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from resiliency.checkpoint import shard_plan
from resiliency.checkpoint.checkpointer import Restored
from resiliency.errors import CorruptShard, NoCheckpointFound, ResiliencyError
from resiliency.inspection.by_path import load_path, locate
from resiliency.storage.catalog import scan
from resiliency.storage.manifest import MANIFEST, ShardRecord
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, Series, flip_bits, make_series, step_dirs
from tests.rings import few

STEPS = (10, 20, 30)
SETTINGS = settings(deadline=None, database=None, max_examples=60, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return make_series(tmp_path_factory.mktemp("series") / "s", steps=STEPS)


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """The same steps of a job with one rank; only its files are used."""
    return make_series(tmp_path_factory.mktemp("other") / "s", steps=STEPS, world_size=1, remote=False)


@pytest.fixture
def copy(series: Series, tmp_path: Path) -> Series:
    return series.copy_to(tmp_path / "copy")


def shard(folder: Path, rank: int) -> Path:
    return folder / f"shard-{rank:05d}.shard"


def record(folder: Path, rank: int) -> Path:
    return folder / f"shard-{rank:05d}.json"


def folder_of(tier: Path, step: int) -> Path:
    (found,) = [path for known, path in step_dirs(tier).items() if known.step == step]
    return found


def alone(series: Series) -> Series:
    """The same with its local tier only. (A remote tier that is merely emptied is filled again at the next start.)"""
    if series.remote:
        shutil.rmtree(series.remote_dir)
    return dataclasses.replace(series, remote=False)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# ---- one damage at a time: where the restore must come from


def restored_from(series: Series) -> int:
    """Loads on all ranks, checks every bit, and returns the step all of them got."""
    restored = series.load()
    assert all(one is not None for one in restored), "nothing was restored"
    found: list[Restored] = [one for one in restored if one is not None]
    assert len({one.id for one in found}) == 1, f"ranks restored {[one.id for one in found]}"
    for rank, one in enumerate(found):
        assert problems(series, one, rank) == []
    return found[0].step


def problems(series: Series, one: Restored, rank: int) -> list[str]:
    """What a rank but the first has for itself may be lost; it is never wrong."""
    if rank and one.per_rank is None:
        one = dataclasses.replace(one, per_rank=series.per_rank(one.step, rank))
    return series.problems(one, rank)


def test_without_damage_the_newest_step_is_restored(copy: Series) -> None:
    assert restored_from(copy) == 30


def _flip_at(path: Path, mark: bytes, further: int = 0) -> None:
    at = path.read_bytes().index(mark) + further
    flip_bits(path, [(at, at + 4)])


SHARD_DAMAGE: dict[str, Callable[[Path], None]] = {
    "first byte": lambda path: flip_bits(path, [(0, 1)]),
    "identity": lambda path: flip_bits(path, [(200, 210)]),
    "padding of the identity": lambda path: flip_bits(path, [(1000, 1010)]),
    "from the storages on": lambda path: flip_bits(path, [(1100, 1 << 40)]),
    "pickle": lambda path: _flip_at(path, b"data.pkl", 60),
    "directory": lambda path: _flip_at(path, b"PK\x01\x02"),
    "state of the rank": lambda path: _flip_at(path, b"resiliency/rank.pt", 200),
    "last byte": lambda path: flip_bits(path, [(-1, 1 << 40)]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]) and None,
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) and None,
    "empty": lambda path: path.write_bytes(b"") and None,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x") and None,
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()) and None,
    "all zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
}


@pytest.mark.parametrize("rank", few([0, 1], [1]))
@pytest.mark.parametrize("damage", [name for name in SHARD_DAMAGE if name != "a folder"])
def test_bad_local_shard_is_repaired_from_the_other_tier(copy: Series, damage: str, rank: int) -> None:
    SHARD_DAMAGE[damage](shard(folder_of(copy.local_dir, 30), rank))
    assert restored_from(copy) == 30
    assert restored_from(alone(copy)) == 30, "the repair did not last"


@pytest.mark.parametrize("damage", SHARD_DAMAGE)
def test_shard_bad_on_both_tiers_means_the_step_before(copy: Series, damage: str) -> None:
    for tier in copy.tiers:
        SHARD_DAMAGE[damage](shard(folder_of(tier, 30), 0))
    assert restored_from(copy) == 20


@pytest.mark.parametrize("damage", SHARD_DAMAGE)
def test_what_a_rank_had_for_itself_is_lost_loudly_and_alone(
    copy: Series, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The state is whole in shard 0: a lost random state is no reason to go back."""
    for tier in copy.tiers:
        SHARD_DAMAGE[damage](shard(folder_of(tier, 30), 1))
    first, second = copy.load()
    assert first is not None and second is not None and copy.problems(first, 0) == []
    if second.step == 30:
        assert second.per_rank is None
        assert "rank 1: no good copy is left of what this rank alone had at step 30" in caplog.text
    else:  # a file of another size is not even listed, so that the step counts as unfinished
        assert copy.problems(second, 1) == []


@pytest.mark.parametrize("damage", SHARD_DAMAGE)
def test_every_copy_bad_is_an_error_that_names_them(copy: Series, damage: str) -> None:
    for tier in copy.tiers:
        for folder in step_dirs(tier).values():
            SHARD_DAMAGE[damage](shard(folder, 0))
    with pytest.raises(CorruptShard) as caught:
        copy.load()
    assert str(shard(folder_of(copy.local_dir, 30), 0)) in str(caught.value)


JSON_DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_text("") and None,
    "cut": lambda path: path.write_text(path.read_text()[:40]) and None,
    "a list": lambda path: path.write_text("[1, 2]") and None,
    "null": lambda path: path.write_text("null") and None,
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00") and None,
    "deep": lambda path: path.write_text("[" * 100_000) and None,
}


@pytest.mark.parametrize("damage", JSON_DAMAGE)
@pytest.mark.parametrize("which", few(["records", "manifest", "all"], ["all"]))
def test_bad_json_on_one_tier_costs_nothing(copy: Series, damage: str, which: str) -> None:
    folder = folder_of(copy.local_dir, 30)
    targets = [record(folder, 0), record(folder, 1)] if which == "records" else [folder / MANIFEST]
    if which == "all":
        targets += [record(folder, 0), record(folder, 1)]
    for target in targets:
        JSON_DAMAGE[damage](target)
    assert restored_from(copy) == 30


@pytest.mark.parametrize("what", ["missing", "cut", "unreadable"])
def test_a_newer_step_that_is_not_whole_is_named_when_an_older_one_is_restored(
    copy: Series, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files are not even tried, so that nothing else says it."""
    one = alone(copy)
    folder = folder_of(one.local_dir, 30)
    if what == "missing":
        shard(folder, 0).unlink()
    elif what == "cut":
        os.truncate(shard(folder, 0), 2000)
    else:
        for path in folder.glob("*.json"):
            path.write_text("{")
    assert restored_from(one) == 20
    said = [text for text in caplog.messages if "is restored instead" in text]
    assert len(said) == 1 and str(folder) in said[0] and "step 20" in said[0], caplog.messages


@pytest.mark.parametrize("damage", [name for name in JSON_DAMAGE if name != "missing"])
def test_only_unreadable_json_is_an_error_and_no_start_from_scratch(tmp_path: Path, damage: str) -> None:
    """The data is there but cannot be judged: saying nothing and training from step 0 would lose it."""
    series = make_series(tmp_path / "s", steps=(10,), remote=False)
    folder = folder_of(series.local_dir, 10)
    for target in (record(folder, 0), record(folder, 1), folder / MANIFEST):
        JSON_DAMAGE[damage](target)
    with pytest.raises(ResiliencyError) as caught:
        series.load()
    assert folder.name in str(caught.value)


@pytest.mark.parametrize("damage", [name for name in JSON_DAMAGE if name != "missing"])
def test_only_an_unreadable_remote_manifest_is_an_error_too(tmp_path: Path, damage: str) -> None:
    series = make_series(tmp_path / "s", steps=(10,))
    shutil.rmtree(series.local_dir)
    JSON_DAMAGE[damage](folder_of(series.remote_dir, 10) / MANIFEST)
    with pytest.raises(ResiliencyError) as caught:
        series.load()
    assert MANIFEST in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"world_size": 1},
        {"world_size": 3},
        {"world_size": 10**7},
        {"nbytes": 0, "digests": []},
        {"nbytes": float("inf")},
        {"block_bytes": 1 << 60},
        {"digests": ["0" * 16]},
        {"rank": 1},
        {"step": 20},
        {"attempt": 2},
        {"token": "00000000"},
        {"run": "another"},
        {"plan": "0" * 16},
        {"version": 99},
        {"nbytes": -1},
        {"rank": -1},
        {"info": 3},
        {"info": {"exact": False}},
        {"created": "soon"},
        {"names": 3},
    ],
    ids=lambda values: ",".join(f"{key}={value}"[:30] for key, value in values.items()),
)
@pytest.mark.parametrize("manifest", few(["good", "missing"], ["missing"]))
@pytest.mark.parametrize("remote", few(["with remote", "alone"], ["with remote"]))
def test_other_values_in_a_record(copy: Series, values: dict[str, Any], manifest: str, remote: str) -> None:
    """Rank 0's record speaks of something else. Without a manifest nothing else vouches for the shard."""
    folder = folder_of(copy.local_dir, 30)
    edit(record(folder, 0), **values)
    if manifest == "missing":
        (folder / MANIFEST).unlink()
    if remote == "alone":
        copy = alone(copy)
    step = restored_from(copy)
    assert step == 30 or (remote == "alone" and step == 20)


def test_one_record_left_that_claims_to_be_all(copy: Series) -> None:
    """A step half deleted, and the world size of what is left damaged: half of the tensors would be uninitialised memory."""
    copy = alone(copy)
    folder = folder_of(copy.local_dir, 30)
    (folder / MANIFEST).unlink()
    record(folder, 1).unlink()
    shard(folder, 1).unlink()
    edit(record(folder, 0), world_size=1)
    assert restored_from(copy) == 20


def test_a_world_size_that_is_too_small_never_gives_half_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors are cut between ranks: without rank 1's rows the rest would be whatever was in memory."""
    monkeypatch.setattr(shard_plan, "_MIN_BLOCK", 1024)
    series = make_series(tmp_path / "s", steps=(10,), remote=False)
    folder = folder_of(series.local_dir, 10)
    (folder / MANIFEST).unlink()
    edit(record(folder, 0), world_size=1)
    try:
        restored = series.load()
    except ResiliencyError as error:
        assert folder.name in str(error)
        return
    for rank, one in enumerate(restored):
        assert one is not None and series.problems(one, rank) == []


# ---- things that are valid but lie in the wrong place


def test_shards_of_two_ranks_exchanged(copy: Series) -> None:
    folder = folder_of(copy.local_dir, 30)
    first, second = shard(folder, 0).read_bytes(), shard(folder, 1).read_bytes()
    shard(folder, 0).write_bytes(second)
    shard(folder, 1).write_bytes(first)
    assert restored_from(copy) == 30


@pytest.mark.parametrize("with_manifest", [True, False])
def test_shards_and_records_of_two_ranks_exchanged(copy: Series, with_manifest: bool) -> None:
    copy = alone(copy)
    folder = folder_of(copy.local_dir, 30)
    for kind in (shard, record):
        first, second = kind(folder, 0).read_bytes(), kind(folder, 1).read_bytes()
        kind(folder, 0).write_bytes(second)
        kind(folder, 1).write_bytes(first)
    if not with_manifest:
        (folder / MANIFEST).unlink()
    assert restored_from(copy) == 20


@pytest.mark.parametrize("files", ["shard", "shard and record", "everything", "manifest"])
def test_files_of_another_step_copied_in(copy: Series, files: str) -> None:
    """As a restore from a backup gone wrong leaves them: all is valid, but of step 20, in the folder of step 30."""
    copy = alone(copy)
    source, target = folder_of(copy.local_dir, 20), folder_of(copy.local_dir, 30)
    chosen = {
        "shard": ["shard-00000.shard"],
        "shard and record": ["shard-00000.shard", "shard-00000.json"],
        "everything": [path.name for path in source.iterdir()],
        "manifest": [MANIFEST],
    }[files]
    for name in chosen:
        shutil.copy(source / name, target / name)
    # With the manifest alone exchanged the records still prove the step.
    assert restored_from(copy) == (30 if files == "manifest" else 20)


@pytest.mark.parametrize(
    "files", [[MANIFEST], ["shard-00000.json"], ["shard-00000.shard", "shard-00000.json", MANIFEST]]
)
def test_files_of_another_run_copied_in(copy: Series, other_run: Series, files: list[str]) -> None:
    copy = alone(copy)
    source, target = folder_of(other_run.local_dir, 30), folder_of(copy.local_dir, 30)
    for name in files:
        shutil.copy(source / name, target / name)
    assert restored_from(copy) == (20 if "shard-00000.shard" in files else 30)


def test_records_of_another_step_are_not_even_listed(copy: Series) -> None:
    """Else the agent would take the folder for a whole step, and delete older ones for it."""
    source, target = folder_of(copy.local_dir, 20), folder_of(copy.local_dir, 30)
    (target / MANIFEST).unlink()
    for path in source.glob("shard-*"):
        shutil.copy(path, target / path.name)
    (listing,) = [found for found in scan(LocalTier(copy.local_dir), RUN) if found.id.step == 30]
    assert listing.manifest is None and listing.records == {} and len(listing.problems) == 2


def test_a_shard_of_another_step_is_refused_even_when_its_record_agrees(copy: Series) -> None:
    """A bug in a writer gives right digests of wrong data; the identity tells."""
    source, target = folder_of(copy.local_dir, 20), folder_of(copy.local_dir, 30)
    (target / MANIFEST).unlink()
    for rank in (0, 1):
        shutil.copy(shard(source, rank), shard(target, rank))
        known, other = json.loads(record(target, rank).read_text()), json.loads(record(source, rank).read_text())
        mixed = ShardRecord.from_dict(known, where="x")
        mixed = dataclasses.replace(mixed, nbytes=other["nbytes"], digests=tuple(other["digests"]))
        record(target, rank).write_text(json.dumps(mixed.to_dict()))
    assert restored_from(alone(copy)) == 20


def test_whole_folder_under_the_name_of_a_later_step(copy: Series) -> None:
    copy = alone(copy)
    source = folder_of(copy.local_dir, 20)
    shutil.copytree(source, source.with_name(source.name.replace("0000000020", "0000000040")))
    assert restored_from(copy) == 30


def test_leftover_of_a_half_deleted_newer_step(copy: Series) -> None:
    """Deletion goes manifest, records, shards: every place it can stop at leaves a step that is whole or not there. The
    first shard alone is a whole step: the records of the host are in it."""
    copy = alone(copy)
    folder = folder_of(copy.local_dir, 30)
    got = []
    for target in (folder / MANIFEST, record(folder, 0), record(folder, 1), shard(folder, 0), shard(folder, 1)):
        target.unlink()
        got.append(restored_from(copy))
    assert got == [30, 30, 30, 20, 20]


def test_stale_attempt_with_a_part_of_a_newer_try(copy: Series) -> None:
    """Attempt 9 wrote one shard of step 30 and died; attempt 1's step 30 is whole."""
    folder = folder_of(copy.local_dir, 30)
    stale = folder.with_name("0000000030-a0009-0123ab-00")
    stale.mkdir()
    shutil.copy(shard(folder, 0), stale)
    text = json.loads(record(folder, 0).read_text())
    (stale / "shard-00000.json").write_text(json.dumps({**text, "attempt": 9, "token": "0123ab"}))
    restored = copy.load()[0]
    assert restored is not None and restored.id.attempt == 1 and restored.step == 30


def test_junk_beside_the_steps_is_passed_over(copy: Series) -> None:
    for tier in copy.tiers:
        steps = folder_of(tier, 30).parent
        (steps / "0000000099-a0001-zzzzzz-00").mkdir()
        (steps / "0000000099-a0001-0000ab-00").mkdir()
        (steps / "0000000099-a0001-0000ab-00" / "manifest.json").mkdir()
        (steps / "0000000098-a0001-0000ab-00").write_text("a file")
        (steps / "lost+found").mkdir()
        (folder_of(tier, 30) / "shard-00007.json").write_text("{}")
        (folder_of(tier, 30) / "shard-.json").write_text("{}")
        (folder_of(tier, 30) / ".shard-00000.shard.partial-1").write_text("x")
    assert restored_from(copy) == 30


def test_a_name_file_that_lies_is_not_what_a_restart_goes_by(copy: Series) -> None:
    data = (copy.local_dir / "step=10.ckpt").read_bytes()
    (copy.local_dir / "step=30.ckpt").unlink()  # it is the file of step 30 itself
    (copy.local_dir / "step=30.ckpt").write_bytes(data)
    assert restored_from(copy) == 30


def test_asked_for_one_step_another_is_never_given(copy: Series) -> None:
    for tier in copy.tiers:
        flip_bits(shard(folder_of(tier, 20), 0), [(-5, -1)])
    (wanted,) = [step for step in step_dirs(copy.local_dir) if step.step == 20]
    with pytest.raises(CorruptShard) as caught:
        copy.load(step=wanted)
    assert wanted.dirname in str(caught.value)


def test_both_tiers_have_half_of_the_step(copy: Series) -> None:
    shard(folder_of(copy.local_dir, 30), 0).unlink()
    flip_bits(shard(folder_of(copy.remote_dir, 30), 1), [(-5, -1)])
    assert restored_from(copy) == 30


def test_damage_found_by_one_rank_only_counts_for_all(copy: Series) -> None:
    """Blocks are shared out: the rank that reads the bad block must win over the one that saw nothing wrong."""
    copy = alone(copy)
    for rank in (0, 1):
        flip_bits(shard(folder_of(copy.local_dir, 30), rank), [(-3, -2)])
    assert restored_from(copy) == 20


# ---- any damage


_TARGETS = ["shard-00000.shard", "shard-00001.shard", "shard-00000.json", "shard-00001.json", MANIFEST]
_KEYS = [
    "version",
    "step",
    "attempt",
    "token",
    "run",
    "rank",
    "world_size",
    "nbytes",
    "block_bytes",
    "digests",
    "plan",
    "names",
    "created",
    "info",
]
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([10**6, -(10**20), 8388608, 1.5, float("nan"), float("inf"), [], {}, "", "0", "run"]),
    st.lists(st.sampled_from(["0" * 16, "f" * 16]), max_size=3),
)


@st.composite
def damages(draw: st.DrawFn) -> tuple[Any, ...]:
    """(kind, tier, step, file, details): one act of damage."""
    place = (draw(st.integers(0, 1)), draw(st.sampled_from(STEPS)), draw(st.sampled_from(_TARGETS)))
    kind = draw(
        st.sampled_from(
            [
                "flip",
                "flip",
                "cut",
                "delete",
                "empty",
                "grow",
                "json",
                "json",
                "from step",
                "from tier",
                "from rank",
                "zero",
                "tree",
            ]
        )
    )
    if kind == "flip":
        starts = draw(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=3))
        return (kind, *place, [(start, draw(st.integers(1, 12))) for start in starts])
    if kind in ("cut", "zero"):
        return (kind, *place, draw(st.floats(0, 0.999)))
    if kind == "json":
        return (kind, *place, draw(st.dictionaries(st.sampled_from(_KEYS), _VALUES, min_size=1, max_size=3)))
    if kind == "from step":
        return (kind, *place, draw(st.sampled_from(STEPS)))
    return (kind, *place, None)


def strike(series: Series, damage: tuple[Any, ...]) -> None:
    kind, tier, step, name, detail = damage
    places = [path for known, path in step_dirs(series.tiers[tier]).items() if known.step == step]
    path = places[0] / name if places else None
    if path is None or not path.is_file():
        return
    data = path.read_bytes()
    if kind == "flip" and data:
        flip_bits(path, [(start % len(data), start % len(data) + length) for start, length in detail])
    elif kind == "cut":
        path.write_bytes(data[: int(len(data) * detail)])
    elif kind == "zero":
        at = int(len(data) * detail)
        path.write_bytes(data[:at] + bytes(len(data) - at))
    elif kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "grow":
        path.write_bytes(data + b"\0")
    elif kind == "tree":
        shutil.rmtree(path.parent)
    elif kind == "json" and name.endswith(".json"):
        try:
            known = json.loads(data)
            if name == MANIFEST:
                known["shards"][0].update(detail)
            else:
                known.update(detail)
            path.write_text(json.dumps(known))
        except (ValueError, KeyError, IndexError, AttributeError, TypeError):
            path.write_text(json.dumps(detail))
    else:
        source = {
            "from step": lambda: folder_of_or_none(series.tiers[tier], detail),
            "from tier": lambda: folder_of_or_none(series.tiers[1 - tier], step),
            "from rank": lambda: path.parent,
        }.get(kind, lambda: None)()
        other = (
            name.replace("00000", "X").replace("00001", "00000").replace("X", "00001") if kind == "from rank" else name
        )
        if source is not None and (source / other).is_file():
            path.write_bytes((source / other).read_bytes())


def folder_of_or_none(tier: Path, step: int) -> Path | None:
    return next((path for known, path in step_dirs(tier).items() if known.step == step), None)


def whole(series: Series, pristine: Series, step: int) -> bool:
    """True when every shard of the step has, on one tier, its bytes and its record (or manifest) just as they were saved."""
    for rank in range(series.world_size):
        for tier, before in zip(series.tiers, pristine.tiers, strict=True):
            folder, old = folder_of_or_none(tier, step), folder_of(before, step)
            # Remote tiers count with their manifest only.
            if folder is not None and _same(folder, old, shard(folder, rank).name) and _same(folder, old, MANIFEST):
                records = [record(folder, r).name for r in range(series.world_size)]
                if all(_same(folder, old, name) or not (folder / name).exists() for name in records):
                    break
        else:
            return False
    return True


def _same(folder: Path, old: Path, name: str) -> bool:
    return (folder / name).is_file() and (folder / name).read_bytes() == (old / name).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("scratch")


@SETTINGS
@given(acts=st.lists(damages(), min_size=1, max_size=8))
def test_any_damage_is_survived_or_refused(series: Series, scratch: Path, acts: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        copy = series.copy_to(Path(folder, "s"))
        for act in acts:
            strike(copy, act)
        best = max((step for step in STEPS if whole(copy, series, step)), default=None)
        try:
            restored = copy.load()
        except (CorruptShard, NoCheckpointFound) as error:
            event("refused")
            assert best is None, f"step {best} is whole, but: {error}"
            assert str(copy.root) in str(error)
            return
        if restored[0] is None:
            # Only when everything of every step is gone, or looks like a save that was never finished.
            event("nothing")
            assert best is None, f"step {best} is whole, but nothing was restored"
            assert all(one is None for one in restored)
            left = [path for tier in copy.tiers for folder in step_dirs(tier).values() for path in folder.iterdir()]
            assert not any(path.name == MANIFEST for path in left), (
                "committed checkpoints are there, but training starts from scratch"
            )
            return
        found = [one for one in restored if one is not None]
        assert len(found) == 2 and found[0].id == found[1].id, (
            f"the ranks restored {[one and one.id for one in restored]}"
        )
        event("restored the newest" if found[0].step == STEPS[-1] else "restored an older one")
        for rank, one in enumerate(found):
            assert problems(series, one, rank) == []
        assert best is None or found[0].step >= best, f"step {best} is whole, but step {found[0].step} was restored"


@settings(SETTINGS, max_examples=40)
@given(acts=st.lists(damages(), min_size=1, max_size=5), step=st.sampled_from(STEPS))
def test_loading_by_path_is_right_or_refused(
    series: Series, scratch: Path, acts: list[tuple[Any, ...]], step: int
) -> None:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        copy = series.copy_to(Path(folder, "s"))
        for act in acts:
            strike(copy, act)
        for tier in copy.tiers:
            try:
                located = locate(str(tier / f"step={step}.ckpt"))
                if located is None:  # what is there says no longer that it is one of ours
                    event("not recognised")
                    continue
                state, per_rank = load_path(located, rank=1)
            except ResiliencyError as error:
                event("refused")
                assert str(tier) in str(error)
                continue
            event("restored")
            found = located.listing.id
            assert problems(copy, Restored(found, state, per_rank, 2, (), {}, 0.0, 0), 1) == []
            # A whole checkpoint under another one's name is what it says it is, as with a stock file.
            whole = (series.tiers[0] / f"step={found.step}.ckpt").read_bytes()
            assert found.step == step or (tier / f"step={step}.ckpt").read_bytes() == whole
