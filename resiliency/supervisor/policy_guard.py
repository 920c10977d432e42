"""Guards the supervisor against a user's policy: an exception, and an answer that comes too late, are errors."""

from __future__ import annotations

import logging
import threading

from resiliency.errors import ResiliencyError
from resiliency.supervisor.model import Remedy
from resiliency.supervisor.policy import Policy, Situation

__all__ = ["GuardedPolicy"]

logger = logging.getLogger(__name__)

#: Seconds that a policy has to answer. The supervisor handles no messages meanwhile.
_ANSWER_S = 2.0


class GuardedPolicy:
    """Asks a policy, each question on a thread of its own. While an answer is late the policy is not asked again.

    Thread: one. Blocks: up to 2 s.

    Args:
        policy: the user's.
    """

    def __init__(self, policy: Policy, *, answer_s: float = _ANSWER_S) -> None:
        self._policy, self._answer_s = policy, answer_s
        self._thread: threading.Thread | None = None

    def event_policy(self, situation: Situation) -> Remedy:
        """Returns the policy's answer, see :class:`~resiliency.supervisor.policy.Policy`.

        Raises:
            ResiliencyError: the policy has raised, or has not answered in time.
        """
        if self._thread is not None and self._thread.is_alive():
            raise ResiliencyError("it has not answered the question before this one yet")
        answers: list[Remedy] = []
        errors: list[str] = []

        def ask() -> None:
            try:
                answers.append(self._policy.event_policy(situation))
            except BaseException as error:  # Boundary: a user's code, which may also call sys.exit.
                logger.exception("the policy has raised")
                errors.append(f"it raised {type(error).__name__}: {error}")

        # A daemon thread, because a policy that hangs must not keep the process alive.
        self._thread = threading.Thread(target=ask, name="supervisor-policy", daemon=True)
        self._thread.start()
        self._thread.join(self._answer_s)
        if errors:
            raise ResiliencyError(errors[0])
        if not answers:
            raise ResiliencyError(f"it has not answered within {self._answer_s:.1f} s: it must decide, not wait")
        return answers[0]  # the caller checks whether it is a remedy
