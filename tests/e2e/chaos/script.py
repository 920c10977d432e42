"""The order of actions that a seed gives: drawn without a look at what they do, so that it is the same again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

#: How often each action comes, and which there are.
WEIGHTS: dict[str, int] = {
    "kill a rank": 7,
    "kill an agent": 8,
    "kill a job": 5,
    "kill everything": 4,
    "stop a rank": 8,
    "stop an agent": 9,
    "stop a reader": 5,
    "wake one": 10,
    "wake all": 5,
    "fork": 9,
    "turn the clock": 8,
    "start a second job": 7,
    "start two jobs at once": 4,
    "end a job": 4,
    "start afresh": 10,
    "move the folder": 5,
    "move the steps": 3,
    "move a step": 4,
    "put a file in place of a step": 3,
    "put a file in place of the steps": 2,
    "put back": 6,
    "flip bits": 8,
    "cut a file": 4,
    "blank a block": 3,
    "remove a file": 2,
    "read": 9,
}


@dataclass(frozen=True)
class Action:
    """One action.

    Attributes:
        kind: a key of :data:`WEIGHTS`.
        pick: 0 to 1: which process, step, file.
        size: 0 to 1: how much, where in the file.
        pause: the next action comes after so many more saves and commits, so that a busy machine changes little.
        stays: a move is not undone at once.
        starts: a job is started afterwards where none runs.
        seed: for what processes draw that this action starts.
    """

    kind: str
    pick: float
    size: float
    pause: int
    stays: bool
    starts: bool
    seed: int


def actions(seed: int, *, roll_back: bool = False) -> Iterator[Action]:
    """Without end. ``roll_back``: also jobs that go back to an older step by themselves."""
    chance = random.Random(seed)
    weights = {**WEIGHTS, "roll back": 8} if roll_back else WEIGHTS
    while True:
        yield Action(
            kind=chance.choices(list(weights), list(weights.values()))[0],
            pick=chance.random(),
            size=chance.random(),
            pause=chance.choice([0, 1, 2, 4, 8]),
            stays=chance.random() < 0.5,
            starts=chance.random() < 0.85,
            seed=chance.randrange(1 << 30),
        )
