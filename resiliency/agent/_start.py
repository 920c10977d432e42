"""Starts the agent process of a host."""

from __future__ import annotations

import logging
import os
import select
import subprocess
from pathlib import Path
from typing import IO

from resiliency.agent._command import AGENT_FUNCTION, AGENT_WORD, agent_command, import_path
from resiliency.agent.config import AgentConfig
from resiliency.agent.protocol import config_to_json
from resiliency.agent.server import EXIT_TAKEN
from resiliency.regular_file import open_regular
from resiliency.runtime.forked_function import call_in_fork

__all__ = ["start_agent"]

logger = logging.getLogger(__name__)

#: Seconds that an agent may take until it listens.
_START_S = 30.0


def start_agent(config: AgentConfig, *, fork: bool) -> subprocess.Popen[bytes] | None:
    """Starts an agent and waits until it listens. Blocks: up to 30 s.

    Args:
        fork: under ``resiliency run``, fork it from a process that already has the imports, which takes a tenth of the
            time of a new interpreter. Whether that agent listens is not reported: connect to find out.

    Returns:
        The process, if it is a child of this one; None when it was forked by the launcher, or when another agent
        already serves the folder.

    Raises:
        TimeoutError: it does not listen within 30 s.
        ConnectionError: it has ended.
        OSError: it cannot be started.
    """
    log = Path(config.run_folder, "logs", f"agent-{config.node}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with _log_file(log) as output:
        return None if fork and _fork(config, output) else _spawn(config, output, log)


def _fork(config: AgentConfig, output: IO[bytes]) -> bool:
    """Asks the launcher to fork an agent, and waits until it listens or ends, up to 30 s; False without a launcher."""
    ready, ready_child = os.pipe()
    with os.fdopen(ready, "rb", buffering=0) as listens:
        try:
            asked = call_in_fork(
                AGENT_FUNCTION,
                [config_to_json(config)],
                words=[AGENT_WORD, config.local.address],
                path=import_path(),
                output=output.fileno(),
                extra=ready_child,
            )
        finally:
            os.close(ready_child)
        if asked:
            _wait(listens)
        return asked


def _spawn(config: AgentConfig, output: IO[bytes], log: Path) -> subprocess.Popen[bytes] | None:
    """Starts an agent as a new interpreter; None when another agent already has the address."""
    ready, ready_child = os.pipe()
    with os.fdopen(ready, "rb", buffering=0) as listens:
        try:
            process = subprocess.Popen(
                agent_command(config, ready_child),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(ready_child,),
            )
        finally:
            os.close(ready_child)
        listening = _wait(listens)
    if listening:
        return process
    try:
        code = process.wait(0 if listening is None else 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
        raise TimeoutError(f"the agent did not listen within {_START_S:.0f} s; see {log}") from None
    if code != EXIT_TAKEN:
        raise ConnectionError(f"the agent exited with status {code} while starting; see {log}")
    return None


def _wait(listens: IO[bytes]) -> bool | None:
    """Waits for an agent to listen; True when it does, False when it has ended, None after 30 s."""
    poller = select.poll()  # select() refuses descriptors of 1024 and above
    poller.register(listens, select.POLLIN)
    return listens.read(1) == b"1" if poller.poll(_START_S * 1000) else None


def _log_file(path: Path) -> IO[bytes]:
    """The agent's log, opened for appending; the null device when it cannot be written."""
    try:
        return os.fdopen(open_regular(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
    except OSError as error:
        logger.warning("the agent's log %s cannot be written, so it has none: %s", path, error)
        return open(os.devnull, "ab")
