"""Decides which modules a zygote imports: the slow ones that the script, or a file beside it, imports by name."""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import suppress
from pathlib import Path

from resiliency.launch.fresh import ScriptCommand

__all__ = ["modules_to_preload"]

#: Modules that may be imported in advance: they start no thread, and do not depend on what a script sets before it
#: imports them.
_KNOWN = ("numpy", "torch", "torchmetrics", "lightning", "pytorch_lightning", "resiliency")
#: Modules that torch and Lightning import only during the first training of a process.
_LATER = (
    "torch.profiler",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
)
_LIGHTNING = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_IMPORT = re.compile(r"(?:^|[;:])[ \t]*(?:from[ \t]+([\w.]+)|import[ \t]+([^;#\n]+))", re.MULTILINE)
_NAME = re.compile(r"(?:^|,)\s*(\w[\w.]*)")  # no relative import: what it names is not of this folder
_MAX_FILES = 200


def modules_to_preload(command: ScriptCommand, cwd: str) -> list[str]:
    """Names of installed modules, in import order. Reads source files, imports nothing."""
    tops = _imported(command, cwd).intersection(_KNOWN)
    modules: list[str] = [name for name in ("numpy", "torchmetrics") if name in tops]
    if tops - {"numpy"}:
        modules += ["torch", "torch.distributed"]
    if tops & set(_LIGHTNING):
        modules += _LATER
    modules += [module for top, module in _LIGHTNING.items() if top in tops]
    if "resiliency" in tops:
        modules += ["resiliency.agent.server"]  # the agent's process is forked from the zygote as well
        with_callback = tops & set(_LIGHTNING)
        modules += ["resiliency.callbacks.model_checkpoint" if with_callback else "resiliency.checkpoint.checkpointer"]
    return [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is not None]


def _imported(command: ScriptCommand, cwd: str) -> set[str]:
    """Packages that are imported anywhere in the script, and in the files that it imports from its folder, or a module
    from its own package."""
    folder = command.import_folder(cwd)
    waiting, own = [Path(cwd, command.target)], ""
    if command.is_module:
        own = command.target.partition(".")[0]
        waiting = [
            path for name in (command.target, f"{command.target}.__main__") for path in _files(name, folder, own)
        ]
    seen: set[Path] = set()
    found: set[str] = set()
    while waiting and len(seen) < _MAX_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        with suppress(OSError):  # running the script will report the error
            for package, packages in _IMPORT.findall(path.read_text(errors="replace")):
                for name in _NAME.findall(package or packages):
                    found.add(name.partition(".")[0])
                    waiting += _files(name, folder, own)
    return found


def _files(name: str, folder: str, own: str) -> list[Path]:
    """The source file of a module in the folder, or of the package of that name wherever it is installed."""
    for root in [folder, *sys.path] if name.partition(".")[0] == own else [folder]:
        base = Path(root, *name.split("."))
        if found := [path for path in (Path(f"{base}.py"), base / "__init__.py") if path.is_file()]:
            return found
    return []
