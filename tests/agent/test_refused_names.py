"""A name that a step cannot have: the others are given, the step is committed, and the user is told where he looks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.inspection.by_path import locate
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import make_checkpointer, make_state

SOON = timedelta(seconds=20)


def _folder(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"a stock sharded checkpoint")


IN_THE_WAY: dict[str, Callable[[Path], Any]] = {"folder": _folder, "fifo": os.mkfifo}


def events(root: Path) -> list[dict[str, Any]]:
    lines = [line for log in root.rglob("events/*.jsonl") for line in log.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event_type"] == "checkpoint_name_refused"]


@pytest.mark.parametrize("kind", IN_THE_WAY)
@pytest.mark.parametrize("agent", ["embedded", "process"])
def test_a_name_that_is_refused_holds_up_no_other_and_is_said_to_the_user(
    tmp_path: Path, kind: str, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    for root in (local, remote):
        root.mkdir()
        IN_THE_WAY[kind](root / "taken.ckpt")
    with make_checkpointer(
        LocalTierOptions(directory=str(local)),
        remotes=[RemoteTierOptions(address=str(remote), name="store")],
        options=CheckpointerOptions(agent=agent),
    ) as checkpointer:
        for step in (1, 2):
            ticket = checkpointer.save(step, make_state(step), names=["taken.ckpt", "free.ckpt"])
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
            ticket.wait(Stage.DURABLE, tier="store", timeout=SOON)
        assert not [outcome for outcome in checkpointer.poll() if outcome.failed]
    for root in (local, remote):
        found = locate(str(root / "free.ckpt"))
        assert found is not None and found.id.step == 2, root
    told = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert [("was not given the name 'taken.ckpt'" in text, "move it away" in text) for text in told] == [
        (True, True)
    ] * 2
    assert "on local" in told[0] and "on store" in told[1]
    assert {(event["step"], event["tier"], event["name"]) for event in events(tmp_path)} == {
        (step, tier, "taken.ckpt") for step in (1, 2) for tier in ("local", "store")
    }
