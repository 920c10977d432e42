"""The fork server of the tests says where its workers are."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import Timeout
from resiliency.testing.zygote import Zygote


def wait_with_a_child(*, ready: str) -> None:
    if os.fork() == 0:
        wait_in_the_child(ready)
    signal.pause()


def wait_in_the_child(ready: str) -> None:
    with open(ready, "w"):
        signal.pause()


def test_the_stacks_of_a_worker_that_hangs_and_of_its_children_are_shown(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    with Zygote([], log=str(tmp_path / "log"), path=[str(Path(__file__).parents[2])]) as zygote:
        worker = zygote.start(f"{__name__}:wait_with_a_child", {"ready": str(ready)})
        with pytest.raises(Timeout, match=f"worker {worker.pid} still runs"):
            worker.wait(timeout_s=0.1)
        with open(ready):  # waits for the child to open it
            text = zygote.stacks_of([worker])
        assert worker.wait(timeout_s=10) == -signal.SIGABRT
    assert text.count("Fatal Python error: Aborted") == 2
    assert "in wait_in_the_child" in text


def test_a_worker_that_has_ended_before_it_is_looked_at_is_given_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Zygote([], log=str(tmp_path / "log")) as zygote:
        wait_for = zygote._changed.wait_for

        def wait_too_long(condition: Any, timeout_s: float) -> bool:
            return wait_for(condition, timeout_s) and wait_for(lambda: not zygote._workers, timeout_s)

        monkeypatch.setattr(zygote._changed, "wait_for", wait_too_long)
        assert zygote.start("os:getpid", {}).wait(timeout_s=10) == 0
