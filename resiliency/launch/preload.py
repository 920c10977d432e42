"""Decides which modules a zygote imports: the slow ones that the script, or a file beside it, imports by name."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

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
_MAX_FILES = 200


def modules_to_preload(command: ScriptCommand, cwd: str) -> list[str]:
    """Names of installed modules, in import order. Reads source files, imports nothing."""
    folder = command.import_folder(cwd)
    path = [folder, *sys.path]
    own = command.target.partition(".")[0] if command.is_module else ""
    start = [os.path.join(cwd, command.target)]
    if command.is_module:
        start = [_source(command.target, path), _source(f"{command.target}.__main__", path)]
    found = {name for name in _imported(list(filter(None, start)), folder, own) if name.partition(".")[0] in _KNOWN}
    tops = {name.partition(".")[0] for name in found}
    modules: list[str] = [name for name in ("numpy", "torchmetrics") if name in tops]
    if tops - {"numpy"}:
        modules += ["torch", "torch.distributed"]
    if tops & set(_LIGHTNING):
        modules += _LATER
    modules += [module for top, module in _LIGHTNING.items() if top in tops]
    if "resiliency" in tops:
        modules += ["resiliency.agent.server"]  # the agent's process is forked from the zygote as well
    if "resiliency" in tops and tops & set(_LIGHTNING):
        modules += ["resiliency.callbacks.model_checkpoint"]
    elif "resiliency" in tops:
        modules += ["resiliency.checkpoint.checkpointer"]
    return [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is not None]


def _imported(files: list[str], folder: str, own: str) -> Iterator[str]:
    """Names of modules imported anywhere in the files, and in the files that these import from their folder or their
    own package."""
    seen: set[str] = set()
    waiting = list(files)
    while waiting and len(seen) < _MAX_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        names: list[str] = []
        with suppress(OSError, SyntaxError, ValueError):  # running the script will report the error
            with open(path, "rb") as file:
                names = list(_names(ast.parse(file.read())))
        for name in names:
            yield name
            places = [folder, *sys.path] if own and name.partition(".")[0] == own else [folder]
            source = _source(name, places)
            if source:
                waiting.append(source)


def _source(name: str, path: Sequence[str]) -> str:
    """Source file of a module; "" when there is none. Imports nothing, not even parent packages."""
    places: Sequence[str] | None = path
    spec = None
    above = ""
    for part in name.split("."):
        above = f"{above}.{part}" if above else part
        spec = None if places is None else importlib.machinery.PathFinder.find_spec(above, places)
        if spec is None:
            return ""
        places = spec.submodule_search_locations
    return spec.origin if spec is not None and spec.origin and spec.origin.endswith(".py") else ""


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
