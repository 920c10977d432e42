"""Files that describe a training to people who find it later; this library never reads them.

``step=5-context/`` beside ``step=5.ckpt`` holds ``context.json`` (module, hyperparameters, Trainer, versions, command
line) and ``model.txt`` (the module's layers). ``cmd-args.log`` and ``git-info.log`` in the Trainer's root folder say
how it was started. Only a warning follows when they cannot be written: the disk is full, or the place is an address.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from resiliency._version import __version__
from resiliency.compat.markers import CONTEXT_SUFFIX

__all__ = ["context_folder", "note_start", "remove_context", "write_context"]

logger = logging.getLogger(__name__)

_SETTINGS = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "precision", "world_size")
_COMMAND, _GIT = "cmd-args.log", "git-info.log"
_GIT_TIMEOUT_S = 10.0


def context_folder(checkpoint: str) -> Path:
    """The context folder of a checkpoint: ``step=5-context`` for ``step=5.ckpt``."""
    path = Path(checkpoint)
    return path.with_name(path.name.removesuffix(".ckpt") + CONTEXT_SUFFIX)


def write_context(checkpoint: str, trainer: Any) -> None:
    """Writes the context folder of a checkpoint; an earlier one is replaced. Blocks: for two small writes."""
    if "://" in checkpoint:
        logger.warning("no context is written beside %s: only a folder can have one", checkpoint)
        return
    folder = context_folder(checkpoint)
    making = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        making.mkdir(parents=True, exist_ok=True)
        (making / "context.json").write_text(json.dumps(_describe(trainer), indent=2, default=str) + "\n")
        (making / "model.txt").write_text(f"{trainer.lightning_module}\n")
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    except OSError as error:
        logger.warning("the context of %s was not written: %s; training goes on", checkpoint, error)
        shutil.rmtree(making, ignore_errors=True)


def remove_context(checkpoint: str) -> None:
    """Removes the context folder of a checkpoint if it exists."""
    if "://" not in checkpoint:
        shutil.rmtree(context_folder(checkpoint), ignore_errors=True)


def note_start(root: str) -> None:
    """Writes both logs. Those of the previous start are first moved to ``run_0``, ``run_1``, ...; no other file moves.

    ``git-info.log`` is left out when the script is in no git repository. Blocks: for two git commands, at most 20 s.
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


def _describe(trainer: Any) -> dict[str, Any]:
    module = trainer.lightning_module
    lightning = sys.modules[type(trainer).__module__.split(".")[0]]
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "hyper_parameters": dict(module.hparams),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "trainer": {name: getattr(trainer, name, None) for name in _SETTINGS},
        "strategy": type(trainer.strategy).__name__,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            lightning.__name__: getattr(lightning, "__version__", None),
            "resiliency": __version__,
        },
        "command": sys.argv,
    }


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
        command, cwd = ["git", *arguments], place if place.is_dir() else None
        try:
            done = subprocess.run(command, cwd=cwd, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            logger.debug("git %s: %s", arguments[0], error)
            return ""
        parts.append(done.stdout.decode(errors="replace"))
    return f"commit hash: {parts[0]}{parts[1]}"
