"""Guards the supervisor against a user's policy: an exception, and an answer that comes too late, are errors."""

from __future__ import annotations

import logging
import queue
import threading

from resiliency.errors import ResiliencyError
from resiliency.supervisor.model import Remedy
from resiliency.supervisor.policy import Policy, Situation

__all__ = ["GuardedPolicy"]

logger = logging.getLogger(__name__)

#: Seconds that a policy has to answer. The supervisor handles no messages meanwhile.
_ANSWER_S = 2.0


class _Question:
    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.answered = threading.Event()
        self.answer: Remedy | None = None
        self.error = ""


class GuardedPolicy:
    """Asks a policy on a thread of its own. While an answer is late the policy is not asked again.

    Thread: one. Blocks: up to 2 s.

    Args:
        policy: the user's.
    """

    def __init__(self, policy: Policy, *, answer_s: float = _ANSWER_S) -> None:
        self._policy, self._answer_s = policy, answer_s
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._open: _Question | None = None
        self._thread: threading.Thread | None = None

    def event_policy(self, situation: Situation) -> Remedy:
        """Returns the policy's answer, see :class:`~resiliency.supervisor.policy.Policy`.

        Raises:
            ResiliencyError: the policy has raised, or has not answered in time.
        """
        if self._open is not None and not self._open.answered.is_set():
            raise ResiliencyError("it has not answered the question before this one yet")
        self._open = question = _Question(situation)
        if self._thread is None:  # a daemon thread, because a policy that hangs must not keep the process alive
            self._thread = threading.Thread(target=self._run, name="supervisor-policy", daemon=True)
            self._thread.start()
        self._questions.put(question)
        if not question.answered.wait(self._answer_s):
            raise ResiliencyError(f"it has not answered within {self._answer_s:.1f} s: it must decide, not wait")
        if question.error:
            raise ResiliencyError(question.error)
        # The caller checks whether the answer is a remedy.
        return question.answer  # type: ignore[return-value]

    def close(self) -> None:
        """Ends the thread. If the policy hangs, the thread ends with the process. Idempotent."""
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                question.answer = self._policy.event_policy(question.situation)
            except BaseException as error:  # Boundary: a user's code, which may also call sys.exit.
                logger.exception("the policy has raised")
                question.error = f"it raised {type(error).__name__}: {error}"
            question.answered.set()
