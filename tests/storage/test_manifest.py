"""A manifest that adds up, or none: whatever is in the JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.errors import CorruptShard, UnsupportedFormat
from resiliency.storage import manifest as manifest_module
from resiliency.storage.format_version import FORMAT_VERSION
from resiliency.storage.manifest import Manifest, NameFile, ShardRecord, UnfinishedStep, gather_records
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
            s.nbytes >= 0 and s.block_bytes > 0 and len(s.digests) == -(-s.nbytes // s.block_bytes)
            for s in manifest.shards
        )
    )


def test_a_record_comes_back_from_json() -> None:
    assert ShardRecord.from_dict(json.loads(json.dumps(record().to_dict())), where="x") == record()


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
    assert len(got.digests) == -(-got.nbytes // got.block_bytes)
    assert isinstance(got.info, dict) and got.id.step >= 0 and StepId.parse(got.id.dirname) == got.id


@SETTINGS
@given(st.lists(changes, min_size=1, max_size=3), st.booleans(), changes)
def test_any_manifest_adds_up_or_is_refused(values: list[dict[str, Any]], keep: bool, top: dict[str, Any]) -> None:
    shards = [sealed({**record(rank, len(values)).to_dict(), **change}) for rank, change in enumerate(values)]
    data = {"version": 1, "shards": shards, **(top if keep else {})}
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
    assert NameFile.from_json(text) is None


@SETTINGS
@given(st.binary(max_size=60), st.integers(0, 3000))
def test_a_manifest_with_other_bytes_in_it(data: bytes, at: int) -> None:
    manifest = gather_records([record(0), record(1)])
    assert manifest is not None
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
    [(FORMAT_VERSION + 1, "upgrade resiliency"), (1, "export it with the version"), (True, "export")],
)
def test_another_version_of_the_format_is_refused_with_what_to_do(version: object, advice: str) -> None:
    with pytest.raises(UnsupportedFormat, match=f"x has checkpoint format {version}, this version reads 2: {advice}"):
        ShardRecord.from_dict(versioned(record(0), version), where="x")
    manifest = gather_records([record(0), record(1)])
    assert isinstance(manifest, Manifest)
    data = json.loads(manifest.to_json())
    with pytest.raises(UnsupportedFormat, match=advice):
        Manifest.from_json(json.dumps({**data, "version": version}), where="x")
    name = json.loads(NameFile(run="r", id=record(0).id).to_json())
    with pytest.raises(UnsupportedFormat, match=advice):
        NameFile.from_json(json.dumps({**name, "version": version}))


def test_a_flipped_version_is_damage_and_not_another_format() -> None:
    with pytest.raises(CorruptShard, match="check sum") as caught:
        ShardRecord.from_dict({**record().to_dict(), "version": FORMAT_VERSION + 1}, where="x")
    assert not isinstance(caught.value, UnsupportedFormat)


@given(
    st.integers(0, 10**15),
    st.integers(1, 10**6),
    st.text("0123456789abcdef", min_size=6, max_size=6),
    st.integers(0, 10**6),
)
def test_folder_names_and_json_spell_the_step(step: int, attempt: int, token: str, serial: int) -> None:
    found = StepId(step, attempt, token, serial)
    assert StepId.parse(found.dirname) == found == StepId.from_dict(json.loads(json.dumps(found.to_dict())))


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
    ],
)
def test_other_folder_names_are_no_steps(name: str) -> None:
    assert StepId.parse(name) is None


def test_what_a_later_start_saved_is_newer() -> None:
    """Also when it went back to an older step, because the newest was damaged or the user wanted to."""
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
        else "1"
    )
    with pytest.raises(CorruptShard):
        ShardRecord.from_dict(data, where="x")


def test_a_name_file_comes_back_from_json() -> None:
    name = NameFile(run="r", id=StepId(7, 1, "0a0b0c"))
    assert NameFile.from_json(name.to_json()) == name
    assert name.id.dirname in name.to_json()
