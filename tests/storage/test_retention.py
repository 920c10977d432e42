"""What retention may never do, for any history of a run."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.storage.manifest import Manifest, ShardRecord
from resiliency.storage.retention import Hold, live_names, steps_to_delete
from resiliency.storage.step_id import StepId

SETTINGS = settings(deadline=None, database=None, max_examples=400, suppress_health_check=list(HealthCheck))
NAMES = ["a", "b", "last"]

ids = st.builds(StepId, st.integers(0, 12), st.integers(1, 3), st.sampled_from(["00000000", "00000001"]))


def manifest(step: StepId, names: tuple[str, ...] = (), supersedes: tuple[str, ...] = ()) -> Manifest:
    record = ShardRecord(
        id=step,
        run="r",
        rank=0,
        world_size=1,
        node="n",
        nbytes=0,
        block_bytes=1,
        digests=(),
        plan="",
        names=names,
        supersedes=supersedes,
    )
    return Manifest(id=step, run="r", world_size=1, shards=(record,))


some_names = st.lists(st.sampled_from(NAMES), max_size=2, unique=True).map(tuple)
histories = st.dictionaries(ids, st.tuples(some_names, some_names), max_size=9).map(
    lambda found: [manifest(k, *v) for k, v in found.items()]
)
keeps = st.one_of(st.none(), st.integers(1, 4))
deletions = st.dictionaries(st.sampled_from(NAMES), ids, max_size=2)


@SETTINGS
@given(histories, st.sets(ids, max_size=5), keeps, st.booleans(), deletions, st.sets(ids, max_size=4))
def test_only_what_nobody_needs_is_deleted_whatever_is_there(
    complete: list[Manifest],
    others: set[StepId],
    keep: int | None,
    keep_named: bool,
    deleted: dict[str, StepId],
    busy: set[StepId],
) -> None:
    known = {m.id for m in complete}
    incomplete = sorted(others - known)
    before = (list(complete), list(incomplete))
    doomed = steps_to_delete(complete, incomplete, keep=keep, keep_named=keep_named, deleted=deleted, busy=busy)
    assert (complete, incomplete) == before
    gone = set(doomed)
    assert len(gone) == len(doomed) and doomed == sorted(doomed), "oldest first, each once"
    assert gone <= known | set(incomplete), "deletes only what it was shown"
    assert not gone & busy
    newest = max(known, default=None)
    assert newest not in gone, "the newest complete step always lives"
    if newest is None:
        assert not gone
        return
    assert all(step < newest for step in gone & set(incomplete)), (
        "a save newer than the newest complete one may still be going on"
    )
    live = live_names(complete, deleted=deleted)
    if keep_named:
        assert not gone & set(live.values()), "a name still means it"
        unnamed = sorted(m.id for m in complete if not m.names)
        kept = unnamed if keep is None else unnamed[-keep:]
        assert not gone & set(kept)
    else:
        assert not gone & set(sorted(known)[-(keep or len(known)) :])
        assert keep is None or len(known - gone - busy) <= keep
    # Nothing stays without a reason, or the disk fills up.
    stays = known - gone - busy - {newest} - (set(live.values()) if keep_named else set())
    by_age = sorted(m.id for m in complete if not m.names or not keep_named)
    assert stays <= set(by_age if keep is None else by_age[-keep:])
    assert all(step in gone or step in busy or step > newest for step in incomplete)


@SETTINGS
@given(histories, deletions)
def test_names_mean_the_newest_step_that_has_them(complete: list[Manifest], deleted: dict[str, StepId]) -> None:
    live = live_names(complete, deleted=deleted)
    for name, step in live.items():
        holders = [m.id for m in complete if name in m.names]
        assert step == max(holders)
        assert not [m.id for m in complete if name in m.supersedes and m.id > step]
        assert name not in deleted or deleted[name] < step
    for name in {n for m in complete for n in m.names} - set(live):
        newest = max(m.id for m in complete if name in m.names)
        assert (name in deleted and deleted[name] >= newest) or [
            m for m in complete if name in m.supersedes and m.id > newest
        ]


@SETTINGS
@given(histories, st.sets(ids, max_size=3), keeps, st.booleans())
def test_doing_it_twice_deletes_no_more(
    complete: list[Manifest], incomplete: set[StepId], keep: int | None, keep_named: bool
) -> None:
    """Without names moving on by the deletion itself, what survived once survives for ever."""
    others = sorted(incomplete - {m.id for m in complete})
    gone = set(steps_to_delete(complete, others, keep=keep, keep_named=keep_named))
    left = [m for m in complete if m.id not in gone]
    again = steps_to_delete(left, [step for step in others if step not in gone], keep=keep, keep_named=keep_named)
    assert again == []


def test_a_name_and_its_superseding_in_one_step() -> None:
    """Replacing "best" by itself: the step that says both keeps the name."""
    assert live_names([manifest(StepId(1, 1, "a"), ("best",)), manifest(StepId(2, 1, "a"), ("best",), ("best",))]) == {
        "best": StepId(2, 1, "a")
    }


def test_a_step_is_held_until_one_of_the_attempt_follows_it_also_on_a_line_that_rose() -> None:
    """With two folders the line rises to that of the other one after the hold was sent."""
    loaded = StepId(10, 1, "0a0b0c")
    hold = Hold(step=loaded, line=2, attempt=3, token="ffffff")
    assert hold.held([manifest(loaded), manifest(StepId(12, 1, "0a0b0c"))]) == {loaded}
    assert hold.held([manifest(StepId(11, 3, "ffffff", line=2))]) == frozenset()
    assert hold.held([manifest(StepId(11, 3, "ffffff", line=3))]) == frozenset()
