"""A manifest that adds up, or none: whatever is in the JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.errors import CorruptShard, UnsupportedFormat
from resiliency.storage import manifest as manifest_module
from resiliency.storage.blocks import Blocks
from resiliency.storage.format_version import FORMAT_VERSION
from resiliency.storage.manifest import BlockShare, Manifest, ShardRecord, UnfinishedStep, gather_records
from resiliency.storage.step_id import StepId

SETTINGS = settings(deadline=None, database=None, max_examples=200, suppress_health_check=list(HealthCheck))


def record(rank: int = 0, world_size: int = 2, **values: Any) -> ShardRecord:
    known: dict[str, Any] = {
        "id": StepId(7, 1, "0a0b0c"),
        "run": "r",
        "rank": rank,
        "world_size": world_size,
        "node": "n",
        "nbytes": 20,
        "block_bytes": 8,
        "digests": ("a" * 16, "b" * 16, "c" * 16),
        "plan": "p",
        "names": ("x.ckpt",),
        "supersedes": ("y.ckpt",),
        "created": 5.0,
        "info": {"k": [1]},
    }
    return ShardRecord(**{**known, **values})


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """With a check sum that is right, so that the values themselves are looked at."""
    fields = {key: value for key, value in data.items() if key != "check"}
    return {**fields, "check": manifest_module._check(fields)}


def adds_up(manifest: Manifest) -> bool:
    return (
        [shard.rank for shard in manifest.shards] == list(range(manifest.world_size))
        and all(
            (s.id, s.run, s.world_size) == (manifest.id, manifest.run, manifest.world_size) for s in manifest.shards
        )
        and len({s.plan for s in manifest.shards}) == 1
        and all(
            s.complete and len(s.digests) == Blocks(s.nbytes, s.block_bytes, s.sections).count for s in manifest.shards
        )
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sections": (3, 9), "digests": ("a" * 16, "", "b" * 16, "c" * 16)},
        {"share": BlockShare(first=4, digests=("d" * 16, "e" * 16))},
        {"replicated": True, "exact": False, "tiers": ("store",)},
        {"nbytes": 0, "digests": ()},
    ],
    ids=str,
)
def test_a_record_comes_back_from_json(values: dict[str, Any]) -> None:
    known = record(**values)
    assert ShardRecord.from_dict(json.loads(json.dumps(known.to_dict())), where="x") == known


def test_manifest_round_trip_and_same_bytes_from_every_writer() -> None:
    manifest = gather_records([record(1), record(0)])
    assert isinstance(manifest, Manifest) and adds_up(manifest)
    assert Manifest.from_json(manifest.to_json(), where="x") == manifest
    other = gather_records([record(0), record(1)])
    assert isinstance(other, Manifest) and other.to_json() == manifest.to_json()
    assert manifest.names == ("x.ckpt",) and manifest.supersedes == ("y.ckpt",) and manifest.nbytes == 40


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(0)],
        [record(1)],
        [record(0), record(0)],
        [record(0), record(1, plan="q")],
        [record(0), record(1, run="s")],
        [record(0), record(1, id=StepId(8, 1, "0a0b0c"))],
        [record(0), record(1, id=StepId(7, 2, "0a0b0c"))],
        [record(0), record(1, id=StepId(7, 1, "0a0b0c", 1))],
        [record(0), record(1, 3)],
        [record(0), record(1), record(2)],
        [record(0, 1), record(1, 2)],
        [record(0), record(1, replicated=True)],
        [record(0, digests=("a" * 16, "", "c" * 16)), record(1)],
    ],
)
def test_records_that_do_not_make_a_step(records: list[ShardRecord]) -> None:
    assert not isinstance(gather_records(records), Manifest)


def test_some_records_of_a_step_are_an_unfinished_step() -> None:
    found = gather_records([record(1), record(1)])
    assert isinstance(found, UnfinishedStep) and not isinstance(found, Manifest)
    assert (found.id, found.world_size, found.names) == (record(1).id, 2, ("x.ckpt",)) and found.shards == (record(1),)
    assert gather_records([record(0), record(1, plan="q")]) is None, "they belong to different saves"


@pytest.mark.parametrize("shards", [(), (record(0),), (record(1), record(0)), (record(0), record(0))])
def test_a_manifest_that_is_not_whole_cannot_be_made(shards: tuple[ShardRecord, ...]) -> None:
    with pytest.raises(ValueError, match="do not make a step of 2|shards"):
        Manifest(id=record(0).id, run="r", world_size=2, shards=shards)


def test_a_huge_world_size_costs_no_memory() -> None:
    """A damaged record must not make every rank count to 10**18."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, hard))
    try:
        assert not isinstance(gather_records([record(0, 10**18)]), Manifest)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["0a0b0c00", "p", "r", "7", 1e999, 10**30]),
    st.lists(st.text(max_size=3) | st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
changes = st.dictionaries(st.sampled_from([*record().to_dict(), "extra"]), scalars, max_size=4)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["shards", "version", "step"]), inner, max_size=3)
    ),
)


@SETTINGS
@given(changes)
def test_any_record_is_right_or_refused(values: dict[str, Any]) -> None:
    data = json.loads(json.dumps(sealed({**record().to_dict(), **values})))
    try:
        got = ShardRecord.from_dict(data, where="the file")
    except CorruptShard as error:
        assert "the file" in str(error) and error.path == "the file"
        return
    assert got.nbytes >= 0 and 0 <= got.rank < got.world_size
    assert len(got.digests) == Blocks(got.nbytes, got.block_bytes, got.sections).count
    assert got.share is None or got.share.first >= 0
    assert isinstance(got.info, dict) and got.id.step >= 0 and StepId.parse(got.id.dirname) == got.id


@SETTINGS
@given(st.lists(changes, min_size=1, max_size=3), st.booleans(), changes)
def test_any_manifest_adds_up_or_is_refused(values: list[dict[str, Any]], keep: bool, top: dict[str, Any]) -> None:
    shards = [sealed({**record(rank, len(values)).to_dict(), **change}) for rank, change in enumerate(values)]
    data = {"version": FORMAT_VERSION, "shards": shards, **(top if keep else {})}
    try:
        manifest = Manifest.from_json(json.dumps(data), where="the file")
    except CorruptShard as error:
        assert "the file" in str(error)
        return
    assert adds_up(manifest)


@SETTINGS
@given(
    st.one_of(
        st.binary(),
        st.text(),
        junk.map(json.dumps),
        st.sampled_from(["[" * 100_000, '{"shards":' * 50_000, "NaN", "\ufeff{}"]),
    )
)
def test_any_bytes_are_refused(text: str | bytes) -> None:
    with pytest.raises(CorruptShard):
        Manifest.from_json(text, where="x")


@SETTINGS
@given(st.binary(max_size=60), st.integers(0, 3000))
def test_a_manifest_with_other_bytes_in_it(data: bytes, at: int) -> None:
    manifest = gather_records([record(0), record(1)])
    assert isinstance(manifest, Manifest)
    text = manifest.to_json().encode()
    try:
        got = Manifest.from_json(text[: at % len(text)] + data + text[at % len(text) + len(data) :], where="x")
    except CorruptShard:
        return
    assert adds_up(got)


def versioned(record: ShardRecord, version: object) -> dict[str, object]:
    """A sound record of another version."""
    fields = {**{key: value for key, value in record.to_dict().items() if key != "check"}, "version": version}
    return {**fields, "check": manifest_module._check(fields)}


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (FORMAT_VERSION + 1, "upgrade resiliency"),
        (1, "export it with the version"),
        (2, "export it with the version"),
        (True, "export"),
    ],
)
def test_another_version_of_the_format_is_refused_with_what_to_do(version: object, advice: str) -> None:
    with pytest.raises(
        UnsupportedFormat, match=f"x has checkpoint format {version}, this version reads 3, 4 and 5: {advice}"
    ):
        ShardRecord.from_dict(versioned(record(0), version), where="x")
    manifest = gather_records([record(0), record(1)])
    assert isinstance(manifest, Manifest)
    data = json.loads(manifest.to_json())
    with pytest.raises(UnsupportedFormat, match=advice):
        Manifest.from_json(json.dumps({**data, "version": version}), where="x")


def test_a_flipped_version_is_damage_and_not_another_format() -> None:
    with pytest.raises(CorruptShard, match="check sum") as caught:
        ShardRecord.from_dict({**record().to_dict(), "version": FORMAT_VERSION + 1}, where="x")
    assert not isinstance(caught.value, UnsupportedFormat)


@given(
    st.integers(0, 10**15),
    st.integers(1, 10**6),
    st.text("0123456789abcdef", min_size=6, max_size=6),
    st.integers(0, 10**6),
    st.none() | st.integers(1, 10**6),
)
def test_folder_names_and_json_spell_the_step(
    step: int, attempt: int, token: str, serial: int, line: int | None
) -> None:
    found = StepId(step, attempt, token, serial) if line is None else StepId(step, attempt, token, serial, line)
    assert found.line == (line or attempt) and ("-l" in found.dirname) is (found.line != attempt)
    assert StepId.parse(found.dirname) == found == StepId.from_jsonable(json.loads(json.dumps(found.to_dict())))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "0000000001-a0001-0A0B0C-00",
        "1-a0001-0a0b0c-00",
        "0000000001-a0001-0a0b0c00",
        "0000000001-a0001-0a0b0c-00x",
        "0000000001-a0001-0a0b0c-00/x",
        "-0000000001-a0001-0a0b0c-00",
        "0000000001-a0001-0a0b0c-0\n",
        "0000000001-a0002-0a0b0c-00-l0002",
        "0000000001-a0002-0a0b0c-00-l0000",
        "0000000001-a0002-0a0b0c-00-l1",
        "0000000001-a0002-0a0b0c-00-l0001x",
    ],
)
def test_other_folder_names_are_no_steps(name: str) -> None:
    assert StepId.parse(name) is None


def test_steps_are_ordered_by_line_then_step_then_who_saved_it() -> None:
    steps = [
        StepId(step, attempt, token, serial, line)
        for line in (1, 2, 11)
        for step in (0, 9, 10, 10**9)
        for attempt in (1, 3, 12)
        for serial in (0, 1, 10)
        for token in ("0a0b0c", "ffffff")
    ]
    assert sorted(reversed(steps)) == steps and len(set(steps)) == len(steps)


def test_identities_without_a_line_are_ordered_by_attempt() -> None:
    """Those of folders that were written before there were lines."""
    assert StepId.from_jsonable({"step": 5, "attempt": 3, "token": "0a0b0c", "serial": 0}).line == 3
    steps = [
        StepId(step, attempt, "0a0b0c", serial)
        for attempt in (1, 2, 11)
        for step in (0, 9, 10, 10**9)
        for serial in (0, 1, 2, 10, 100)
    ]
    assert sorted(reversed(steps)) == steps


@pytest.mark.parametrize("change", [*record().to_dict()])
def test_a_record_is_refused_when_any_value_changed(change: str) -> None:
    data = record().to_dict()
    data[change] = (
        data[change] + 1
        if isinstance(data[change], int | float)
        else [*data[change], "1"]
        if isinstance(data[change], list)
        else {"first": 0, "digests": []}
        if change == "share"
        else "1"
    )
    with pytest.raises(CorruptShard):
        ShardRecord.from_dict(data, where="x")


# -- shard 0 of a replicated step is written by several ranks ---------------------------------------------------------


@st.composite
def shared_shards(draw: st.DrawFn) -> tuple[list[ShardRecord], list[str]]:
    """The records of a replicated step whose first shard the ranks of one host wrote in any split, and its digests."""
    nbytes = draw(st.integers(1, 200))
    sections = draw(st.sets(st.integers(1, max(1, nbytes - 1)), max_size=3)) if nbytes > 1 else set()
    blocks = Blocks(nbytes, draw(st.integers(1, 50)), tuple(sorted(sections)))
    digests = [f"{index:016x}" for index in range(blocks.count)]
    world_size = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, len(digests)), min_size=world_size - 1, max_size=world_size - 1)))
    edges = [0, *cuts, len(digests)]
    order = draw(st.permutations(range(world_size)))  # whose part comes first
    parts = {rank: range(edges[number], edges[number + 1]) for number, rank in enumerate(order)}
    records = [
        record(
            0,
            world_size,
            replicated=True,
            nbytes=nbytes,
            block_bytes=blocks.block_bytes,
            sections=blocks.sections,
            digests=tuple(digest if index in parts[0] else "" for index, digest in enumerate(digests)),
        )
    ]
    for rank in range(1, world_size):
        part = parts[rank]
        share = BlockShare(first=part.start, digests=tuple(digests[part.start : part.stop])) if part else None
        records.append(record(rank, world_size, replicated=True, share=share))
    return records, digests


@SETTINGS
@given(shared_shards(), st.randoms())
def test_any_split_among_the_ranks_gives_the_digests_of_the_whole_shard(
    given_: tuple[list[ShardRecord], list[str]], random: Any
) -> None:
    records, digests = given_
    random.shuffle(records)
    # As other agents read them.
    records = [ShardRecord.from_dict(json.loads(json.dumps(known.to_dict())), where="x") for known in records]
    manifest = gather_records(records)
    assert isinstance(manifest, Manifest) and adds_up(manifest)
    assert manifest.shards[0].digests == tuple(digests) and manifest.replicated
    assert Manifest.from_json(manifest.to_json(), where="x") == manifest
    again = gather_records(sorted(records, key=lambda known: known.rank))
    assert isinstance(again, Manifest) and again.to_json() == manifest.to_json()


@SETTINGS
@given(shared_shards(), st.data())
def test_a_block_without_a_digest_leaves_the_step_unfinished_whoever_should_have_written_it(
    given_: tuple[list[ShardRecord], list[str]], data: st.DataObject
) -> None:
    records, digests = given_
    hole = data.draw(st.integers(0, len(digests) - 1))
    kept = []
    for known in records:
        share = known.share
        if share is not None and hole in range(share.first, share.first + len(share.digests)):
            share = BlockShare(first=share.first, digests=share.digests[: hole - share.first])
        own = known.digests
        if known.rank == 0:
            own = tuple("" if index == hole else digest for index, digest in enumerate(own))
        kept.append(replace(known, share=share, digests=own))
    found = gather_records(kept)
    assert isinstance(found, UnfinishedStep)
    assert [shard.rank for shard in found.shards] == list(range(1, len(records))), "shard 0 is as good as missing"
    lost = gather_records([known for known in records if known.rank == 0 and not known.complete])
    assert lost is None or (isinstance(lost, UnfinishedStep) and lost.shards == ())


@SETTINGS
@given(shared_shards(), st.data())
def test_shares_of_another_nodes_ranks_are_not_used(
    given_: tuple[list[ShardRecord], list[str]], data: st.DataObject
) -> None:
    """They wrote into their own host's copy."""
    records, _ = given_
    strangers = {rank for rank in range(1, len(records)) if data.draw(st.booleans())}
    moved = [replace(known, node="another") if known.rank in strangers else known for known in records]
    found = gather_records(moved)
    assert found is not None
    whole = not any(known.share is not None for known in moved if known.rank in strangers)
    assert (0 in [shard.rank for shard in found.shards]) == whole
    assert isinstance(found, Manifest) == whole


def test_a_share_cannot_replace_what_rank_0_says_of_its_own_blocks() -> None:
    first = record(0, replicated=True, digests=("a" * 16, "", "c" * 16))
    second = record(1, replicated=True, share=BlockShare(first=0, digests=("x" * 16, "b" * 16, "y" * 16, "z" * 16)))
    found = gather_records([first, second])
    assert isinstance(found, Manifest)
    assert found.shards[0].digests == ("a" * 16, "b" * 16, "c" * 16)
