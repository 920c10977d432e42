"""The agent's threads where the system allows no further one."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from resiliency.agent._worker import Worker
from resiliency.errors import AgentError


def test_a_thread_that_cannot_be_started_is_an_error_of_the_agent_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    worker = Worker("resiliency-agent-commit")

    def no_more_threads(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(AgentError, match="resiliency-agent-commit: can't start new thread.*pids.max"):
            worker.submit(lambda: done.append("first"))
    assert worker.idle
    worker.submit(lambda: done.append("second"))
    assert worker.wait_idle(time.monotonic() + 10) and done == ["second"]
    worker.close()
