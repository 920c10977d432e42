"""Writes how a run was started to ``cmd-args.log`` and ``git-info.log`` in its folder; files of earlier starts are
kept."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from pathlib import Path

__all__ = ["note_start"]

logger = logging.getLogger(__name__)

_COMMAND, _GIT = "cmd-args.log", "git-info.log"
_GIT_TIMEOUT_S = 10.0


def note_start(root: str) -> None:
    """Writes both files. Those of the previous start are first moved to ``run_0``, ``run_1``, ...; no other file moves.

    ``git-info.log`` is left out when the script is in no git repository. Blocks: for two git commands, at most 20 s.
    Only warns when it cannot write: ``root`` is an address, or the disk is full.
    """
    if "://" in root:
        logger.warning("preprocess_files=True: %s is an address, where no cmd-args.log is written", root)
        return
    folder = Path(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _move_earlier(folder)
        (folder / _COMMAND).write_text(shlex.join(sys.argv) + "\n")
        found = _git_info()
        if found:
            (folder / _GIT).write_text(found)
    except OSError as error:
        logger.warning("preprocess_files=True: %s; training goes on without cmd-args.log", error)


def _move_earlier(folder: Path) -> None:
    earlier = [path for path in (folder / _COMMAND, folder / _GIT) if path.exists()]
    if not earlier:
        return
    number = 0
    while (folder / f"run_{number}").exists():
        number += 1
    kept = folder / f"run_{number}"
    kept.mkdir()
    for path in earlier:
        path.rename(kept / path.name)


def _git_info() -> str:
    """Commit and uncommitted changes of the script's git repository; "" when there is none, or git fails."""
    place = Path(sys.argv[0] or ".").absolute().parent
    parts = []
    for arguments in (["rev-parse", "HEAD"], ["diff", "HEAD"]):
        try:
            done = subprocess.run(
                ["git", *arguments],
                cwd=place if place.is_dir() else None,
                capture_output=True,
                timeout=_GIT_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            logger.debug("git %s: %s", arguments[0], error)
            return ""
        parts.append(done.stdout.decode(errors="replace"))
    return f"commit hash: {parts[0]}{parts[1]}"
