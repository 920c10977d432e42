"""The fork server of the tests: what their jobs of several ranks import is imported once for each worker of pytest.

A start of it takes five seconds of processor time, so it is one fixture of the whole session (``zygote`` in conftest.py).
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.agent_forks import VARIABLE

PRELOAD = [
    "tests.entry_points",
    "tests.agent_forks",
    "torch",
    "torch.distributed",
    "torch.distributed.run",
    "lightning.pytorch",
    "torchmetrics",
    "resiliency.checkpoint.checkpointer",
    "tests.callbacks.ddp_job",
    "tests.callbacks.epoch_job",
    "tests.e2e.chaos.reader",
    "tests.e2e.chaos.trainer",
    "tests.e2e.job",
    "tests.launch.test_run",
    "tests.plugins.resume.resume_ddp",
    "aiohttp.web",
    "resiliency.cli.supervisor",
    "resiliency.supervisor.service",
    "tests.supervisor.supervisor_command",
    # Lightning and torch import these in the first training of a process.
    "torch._dynamo",
    "torch.profiler",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "fsspec.implementations.chained",
    "asyncio",
]
#: As those, where torch has them; 2.4 has not.
NEWER = ["torch.profiler._cupti_monitor", "torch.utils.serialization.config"]


class _Zygote(Zygote):
    """Its workers start agents as the test that starts them does."""

    def start(
        self, target: str, arguments: Mapping[str, Any], *, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> WorkerProcess:
        forks = {VARIABLE: os.environ.get(VARIABLE, "")}
        return super().start(target, arguments, env={**forks, **(env or {})}, timeout_s=timeout_s)


def make_zygote(log: Path) -> Zygote:
    return _Zygote([*PRELOAD, *filter(_is_there, NEWER)], log=str(log), path=[str(Path(__file__).parents[1])])


def _is_there(module: str) -> bool:
    """Without an import of its package."""
    top, *below = module.split(".")
    found = importlib.util.find_spec(top)
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0], *below).with_suffix(".py").exists()


def start_script(
    zygote: Zygote, code: str, output: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> WorkerProcess:
    """Runs code as ``python -c`` would, in a fork; all that it prints goes to a file. Ends without exit handlers."""
    path = output.with_suffix(".py")
    path.write_text(code)
    given = {"path": str(path), "arguments": arguments, "output": str(output)}
    return zygote.start(f"{__name__}:run_script", given, env=env)


def run_script(*, path: str, arguments: list[str], output: str) -> None:
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
