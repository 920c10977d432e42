"""Chaos: processes stopped, woken, killed and forked, clocks turned, jobs started beside each other, folders moved and
files damaged, in any order; and whatever is loaded meanwhile is a committed state, bit for bit, and the newest there is.

The order of the actions follows from a seed, which is printed. A longer run, or one that failed again::

    RESILIENCY_CHAOS_ACTIONS=3000 RESILIENCY_CHAOS_SEED=17 pytest -m kill tests/e2e/test_chaos.py -s

``RESILIENCY_CHAOS_ROLL_BACK=1`` adds jobs that load an older step and go on from there. What is newest then follows the
line of descent, which an order by attempts alone does not; that is why they are not in every run.

What happened is in the folder that a failure names: ``ledger.jsonl`` has a line for every save, load and action.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections import Counter
from pathlib import Path

import pytest

from resiliency.testing.zygote import Zygote
from tests.e2e.chaos.models import MODELS
from tests.e2e.chaos.script import actions
from tests.e2e.chaos.world import World
from tests.rings import few

#: Actions that have an effect, of all models together.
ACTIONS = int(os.environ.get("RESILIENCY_CHAOS_ACTIONS", "90"))
NIGHTLY = 330
SEED = int(os.environ.get("RESILIENCY_CHAOS_SEED", "1"))
#: Of the ledger and of what processes have said, where something was wrong: the folder may be gone when it is looked at.
LAST_LINES = 60
#: Of a list in the ledger, and of a text: where only a part of the output is kept.
LAST_ITEMS, TEXT = 3, 160
#: Also jobs that go back to an older step by themselves.
ROLL_BACK = bool(os.environ.get("RESILIENCY_CHAOS_ROLL_BACK"))


def _torment(world: World, seed: int, count: int, stop: threading.Event) -> None:
    try:
        world.torment(actions(seed, roll_back=ROLL_BACK), count)
    except Exception:  # Boundary: a thread's failure must reach the test.
        world.problems.append(traceback.format_exc())
    finally:
        if world.problems:
            stop.set()
        left = world.close()
        if left:
            world.problems.append(f"processes {left} cannot be ended")


def _short(line: str) -> str:
    facts = json.loads(line)
    items = {key: value[-LAST_ITEMS:] if isinstance(value, list) else value for key, value in facts.items()}
    return " ".join(f"{key}={str(value)[:TEXT]}" for key, value in items.items() if key not in ("state", "own"))


@pytest.mark.long
@pytest.mark.kill
@pytest.mark.timeout(180 + 2 * max(ACTIONS, NIGHTLY))
@pytest.mark.parametrize("least", few([ACTIONS, NIGHTLY], [ACTIONS]))
def test_whatever_happens_what_is_loaded_is_the_newest_committed_state(
    least: int, zygote: Zygote, tmp_path: Path, started_agents: None
) -> None:
    """Agents are interpreters of their own: of jobs that open within a tenth of a second, beside a folder that is moved
    away and back, the ledger does not tell in which of the two folders they did."""
    share = -(-least // len(MODELS))
    stop = threading.Event()  # a problem in one folder ends the others too
    worlds = {model: World(zygote, tmp_path / model, model, stop=stop) for model in MODELS}
    threads = [
        threading.Thread(target=_torment, args=(world, SEED * len(MODELS) + number, share, stop))
        for number, world in enumerate(worlds.values())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done, counts = Counter[str](), Counter[str]()
    for world in worlds.values():
        done += world.done
        counts += world.judge.counts
    print(f"seed {SEED}: {done.total()} actions {dict(done)}; {dict(counts)}")
    problems = [f"{model}: {problem}" for model, world in worlds.items() for problem in world.problems]
    if problems:
        for path in [tmp_path / model / "ledger.jsonl" for model, world in worlds.items() if world.problems]:
            print(f"the end of {path}:", *map(_short, path.read_text().splitlines()[-LAST_LINES:]), sep="\n")
        log = Path(zygote.log).read_text(errors="replace").splitlines()[-LAST_LINES:]
        print(f"the end of {zygote.log}:", *log, sep="\n")
    assert not problems, f"seed {SEED}, in {tmp_path}:\n" + "\n".join(problems)
    assert done.total() >= least
    # Otherwise the run has shown little.
    assert counts["loads judged for the newest"] >= least // 6, counts
    assert counts["commits"] >= least // 2, counts
