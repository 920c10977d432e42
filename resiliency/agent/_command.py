"""Builds the command that starts an agent process, with the module search path of the trainer that starts it."""

from __future__ import annotations

import os
import sys
import sysconfig

from resiliency.agent.config import AgentConfig
from resiliency.agent.protocol import config_to_json
from resiliency.settings import package_root

__all__ = ["AGENT_FUNCTION", "AGENT_WORD", "agent_command", "import_path"]

#: An argument of every agent process, by which ``ps`` and :meth:`~resiliency.agent._peer.Peer.runs` recognise one.
AGENT_WORD = "resiliency.agent"

#: The function that an agent process runs.
AGENT_FUNCTION = "resiliency.agent.server:main"

#: Not ``-m``, which would put the working directory first, so that a user's ``json.py`` there would be imported.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[2].split('\\n'); "
    "from resiliency.agent.server import main; sys.exit(main(sys.argv[3:]))"
)


def agent_command(config: AgentConfig, ready_fd: int) -> list[str]:
    """The command line of an agent; it writes one byte to ``ready_fd`` when ranks can connect."""
    path = "\n".join(import_path())
    return [sys.executable, "-c", _BOOTSTRAP, AGENT_WORD, path, config_to_json(config), str(ready_fd)]


def import_path() -> list[str]:
    """The agent's ``sys.path``: that of this process, with the standard library and this copy of the package first, so
    that a user's file cannot replace a module of theirs."""
    path = [os.path.abspath(entry) for entry in sys.path]  # "" is the working directory
    return list(dict.fromkeys([*filter(_is_standard, path), package_root(), *path]))


def _is_standard(entry: str) -> bool:
    folders = {os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    zipped = {os.path.join(os.path.dirname(folder), os.path.basename(entry)) for folder in folders}
    return (
        entry in folders
        or (os.path.basename(entry) == "lib-dynload" and os.path.dirname(entry) in folders)
        or (entry.endswith(".zip") and os.path.basename(entry).startswith("python") and entry in zipped)
    )
