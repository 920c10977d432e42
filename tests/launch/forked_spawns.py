"""Processes that multiprocessing spawns, as forks of a process that has imported what they need.

They are given what a spawned process is given, pickled, and find the main module by its file; but an import of torch and
Lightning takes each of them no seconds.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping, Sequence
from multiprocessing import util
from typing import Any, NoReturn

from tests.launch.fork_helper import ForkHelper
from tests.launch.ready_zygote import end_as_interpreter, keep_only, take_environment

__all__ = ["fork_spawned"]


def fork_spawned() -> None:
    """What this process, which has no threads yet, spawns later are forks of it as it is now."""
    helper = ForkHelper(_run)

    def spawn(path: Any, words: Sequence[Any], fds: Sequence[int]) -> int:
        code = words[words.index("-c") + 1]
        return helper.fork({"code": code, "numbers": list(fds), "environment": dict(os.environ)}, fds)

    util.spawnv_passfds = spawn  # type: ignore[assignment]


def _run(request: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    keep_only(fds, request["numbers"])
    take_environment(request["environment"])
    sys.argv = ["-c", "--multiprocessing-fork"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    end_as_interpreter(lambda: exec(request["code"], vars(main)))
