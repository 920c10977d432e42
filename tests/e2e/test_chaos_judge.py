"""The judge of the chaos suite says what is wrong, and excuses only what we did ourselves; and a seed is one order."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from resiliency.storage.step_id import StepId
from tests.e2e.chaos.judge import Judge
from tests.e2e.chaos.ledger import committed_folders, committed_now, keys_of, steps_folder
from tests.e2e.chaos.script import WEIGHTS, actions

Line = dict[str, Any]


def named(key: str) -> str:
    """A short word as a save; of the first attempt, unless it begins with a number."""
    return f"{key}-a{key[0] if key[0].isdigit() else 1}"


def opened(attempt: int) -> Line:
    return {"what": "opened", "attempt": attempt}


def save(key: str, *, committed: bool = True, rank: int = 0) -> list[Line]:
    key = named(key)
    lines: list[Line] = [
        {"what": "save", "key": key, "rank": rank, "state": f"state {key}", "own": f"own {key} {rank}"}
    ]
    return lines + [{"what": "committed", "key": key}] * committed


def loading(scope: str = "newest", *, seen: tuple[str, ...] = (), falls_back: bool = True) -> Line:
    known = [named(key) for key in seen]
    return {"what": "loading", "load": "1", "how": "a load", "scope": scope, "seen": known, "falls_back": falls_back}


def loaded(key: str | None, *, still: tuple[str, ...] = (), **values: Any) -> Line:
    key = named(key) if key is not None else None
    line = {"what": "loaded", "load": "1", "rank": 0, "key": key, "state": f"state {key}", "own": f"own {key} 0"}
    return {**line, "checked": True, "still": [named(one) for one in still], **values}


def refused(*still: str) -> Line:
    return {"what": "refused", "load": "1", "rank": 0, "error": "an error", "still": [named(key) for key in still]}


def damage(*keys: str) -> Line:
    return {"what": "damage", "keys": [named(key) for key in keys]}


def away(*keys: str) -> Line:
    return {"what": "away", "id": "1", "keys": [named(key) for key in keys] or None}


BACK: Line = {"what": "back", "id": "1"}
AB = [*save("a"), *save("b")]


def problems(*lines: Line) -> list[str]:
    judge = Judge()
    for line in lines:
        judge.read(line)
    return judge.problems


WRONG: dict[str, list[Line]] = {
    "an older state": [*AB, loading(), loaded("a", still=("a", "b"))],
    "an older state, the newer one was only seen": [
        *save("a"),
        *save("b", committed=False),
        loading(seen=("b",)),
        loaded("a", still=("a", "b")),
    ],
    "nothing": [*AB, loading(), loaded(None, still=("a", "b"))],
    "an older state, because the newest was deleted for nothing": [*AB, loading(), loaded("a", still=("a",))],
    "other bytes": [*AB, loading(), loaded("b", still=("a", "b"), state="torn")],
    "other bytes of a damaged step that were checked": [*AB, damage("b"), loading(), loaded("b", state="torn")],
    "other bytes of its own": [*AB, loading(), loaded("b", own="of another rank")],
    "no bytes of its own": [*AB, loading(), loaded("b", own=None)],
    "what nobody saved": [*AB, loading(), loaded("c")],
    "an older name": [*AB, loading("named"), loaded("a", still=("a", "b"), checked=False)],
    "an older name, although the step was deleted": [*AB, *save("c"), loading("named"), loaded("a", still=("c",))],
    "an error": [*AB, loading(), refused("a", "b")],
    "an error, although only the newest is damaged": [*AB, damage("b"), loading(), refused("a", "b")],
    "an older state after all is back": [*AB, away(), BACK, loading(), loaded("a", still=("a", "b"))],
    "a damaged name that is not the newest": [
        *AB,
        damage("a"),
        loading("named", falls_back=False),
        refused("a", "b"),
    ],
    "a rank that hears nothing of the other, to which nothing was done": [
        {"what": "action", "kind": "kill a rank"},
        {"what": "started", "job": "j"},
        *AB,
        loading(),
        {**refused("a", "b"), "job": "j", "error": "Timeout: x"},
    ],
    "an error after the other rank was killed, which is none about it": [
        {"what": "started", "job": "j"},
        *AB,
        {"what": "action", "kind": "kill a rank"},
        loading(),
        {**refused("a", "b"), "job": "j"},
    ],
    "a commit of yesterday's job": [opened(1), *save("a"), opened(2), *save("1b")],
    "two ranks that differ": [*save("a"), {**save("a", rank=1)[0], "state": "other"}],
}

FINE: dict[str, list[Line]] = {
    "a commit of what was begun before the later attempt": [
        opened(1),
        *save("a", committed=False),
        opened(2),
        {"what": "committed", "key": named("a")},
        *save("2b"),
    ],
    "the newest": [*AB, loading(), loaded("b", still=("a", "b"))],
    "a newer one, whose commit nobody knew of": [*AB, *save("c", committed=False), loading(), loaded("c")],
    "the older one when the newest is damaged": [*AB, damage("b"), loading(), loaded("a", still=("a", "b"))],
    "the older one when the newest is damaged meanwhile": [*AB, loading(), damage("b"), loaded("a")],
    "the older one when the newest is away": [*AB, away("b"), loading(), loaded("a")],
    "nothing when all is away": [*AB, away(), loading(), loaded(None)],
    "nothing when all goes away meanwhile": [*AB, loading(), away(), BACK, loaded(None)],
    "the older one when something was away at the commit": [
        *save("a"),
        *save("b", committed=False),
        away("x"),
        BACK,
        {"what": "committed", "key": named("b")},
        loading(),
        loaded("a"),
    ],
    "what was deleted for a newer one": [*AB, loading(), *save("c"), loaded("a", still=("a", "c"))],
    "a rank that hears nothing of the other, which was killed": [
        {"what": "started", "job": "j"},
        *AB,
        loading(),
        {"what": "action", "kind": "kill a rank"},
        {**refused("a", "b"), "job": "j", "error": "Timeout: x"},
    ],
    "an error about the damaged newest": [*AB, damage("b"), loading(falls_back=False), refused("a", "b")],
    "what nobody saved, from a file whose head we have damaged": [
        *AB,
        {**damage("b"), "head": True},
        loading("named"),
        loaded("garbled", checked=False),
    ],
    "other bytes of a damaged step that nobody checked": [
        *AB,
        damage("b"),
        loading("one"),
        loaded("b", state="torn", checked=False),
    ],
}


@pytest.mark.parametrize("what", WRONG)
def test_the_judge_finds_what_is_wrong(what: str) -> None:
    assert problems(*WRONG[what])


@pytest.mark.parametrize("what", FINE)
def test_the_judge_accepts_what_is_right(what: str) -> None:
    assert problems(*FINE[what]) == []


def test_a_seed_is_one_order_of_actions() -> None:
    first, again, other = (list(itertools.islice(actions(seed), 2000)) for seed in (3, 3, 4))
    assert first == again != other
    assert {action.kind for action in first} == set(WEIGHTS)


@pytest.mark.parametrize("first_has_begun", [True, False])
def test_what_is_put_back_after_the_first_rank_has_begun_is_not_demanded_of_the_others(first_has_begun: bool) -> None:
    def begun(rank: int, seen: list[str]) -> Line:
        line = {"what": "loading", "how": "attempt", "scope": "newest", "falls_back": True, "job": "j"}
        return {**line, "load": f"{rank}", "seen": seen}

    def ended(rank: int) -> Line:
        line = {"what": "loaded", "rank": rank, "key": None, "state": "", "own": None, "checked": True, "job": "j"}
        return {**line, "load": f"{rank}", "still": [named("a"), named("b")]}

    first, second = begun(0, []), begun(1, [named("a"), named("b")])
    between = [first, BACK, second] if first_has_begun else [BACK, first, second]
    assert (problems(*AB, away(), *between, ended(0), ended(1)) == []) is first_has_begun


@pytest.mark.parametrize(("steps", "right"), [((6, 38, 17), True), ((6, 8, 17), False), ((6, 38, 38), False)])
def test_of_two_that_descend_from_one_save_the_one_that_got_further_is_the_newest(
    steps: tuple[int, int, int], right: bool
) -> None:
    """Attempt 4 goes on from the first save, because the second was away."""
    first, hidden, later = (f"{step:010d}-a000{attempt}-t-00" for step, attempt in zip(steps, (2, 2, 4), strict=True))

    def saved(key: str) -> list[Line]:
        return [
            {"what": "save", "key": key, "rank": 0, "state": key, "own": key},
            {"what": "committed", "key": key},
        ]

    def load(key: str, *still: str, **more: Any) -> list[Line]:
        begun = {"what": "loading", "load": "1", "how": "attempt", "scope": "newest", "seen": [], "falls_back": True}
        line = {"what": "loaded", "load": "1", "rank": 0, "key": key, "state": key, "own": key, "checked": True}
        return [begun, {**line, "still": list(still), **more}]

    lines = [*saved(first), *saved(hidden), {"what": "away", "id": "1", "keys": [hidden]}]
    lines += [{"what": "opened", "attempt": 4, "job": "j"}, *load(first, first, job="j"), BACK]
    found = problems(*lines, *saved(later), *load(hidden, hidden, later, job="k"))
    assert (found == []) is right, found


def test_steps_are_listed_whatever_line_they_belong_to(tmp_path: Path) -> None:
    """After a restart the folder's name has the line too; what is not listed is never damaged, moved or demanded."""
    step = StepId(7, 2, "abcdef", 0, 1)
    for of in (step, dataclasses.replace(step, step=8, line=2)):
        folder = steps_folder(tmp_path) / of.dirname
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(of.to_dict()))
    (steps_folder(tmp_path) / "notes").mkdir()
    keys = ["0000000007-a0002-abcdef-00", "0000000008-a0002-abcdef-00"]
    assert committed_now(tmp_path) == keys == keys_of(os.listdir(steps_folder(tmp_path)))
    assert [path.name for path in committed_folders(tmp_path).values()] == [f"{keys[0]}-l0001", keys[1]]
