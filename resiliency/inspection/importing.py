"""Makes a step of this library of a checkpoint that torch or Lightning wrote: a distributed one or a file.

The step is saved by the engine, as a job of one rank would save it: with digests, committed at once or not at all. So
listing, verifying, tiers and resuming know it from then on. It is replicated, whatever the source was, and resumes into
any strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.lightning_forms import dumped_form
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions
from resiliency.checkpoint.stock_reader import is_stock_folder
from resiliency.errors import ConfigError, NoCheckpointFound, ResiliencyError
from resiliency.inspection.by_path import locate_and_load
from resiliency.inspection.liveness import evidence_of_use
from resiliency.inspection.pickle_errors import pickle_errors
from resiliency.inspection.stock_state import load_stock_file, load_stock_folder
from resiliency.inspection.survey import is_committed, listings
from resiliency.settings import environment
from resiliency.storage.names import read_name
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier

__all__ = ["Imported", "bytes_of", "import_checkpoint"]

#: A save may take as long as a slow disk, and then some.
_SAVE_S, _SAVE_BYTES_PER_S = 600.0, 10e6


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The step that was made.

    Attributes:
        path: its name, which is a stock torch file, too.
        run, id: the step.
        nbytes: of that file.
    """

    path: str
    run: str
    id: StepId
    nbytes: int


def bytes_of(source: str) -> int:
    """Bytes of the files of a checkpoint on this machine, for a progress bar."""
    if not os.path.isdir(source):
        return os.stat(source).st_size
    with os.scandir(source) as files:
        return sum(file.stat().st_size for file in files if file.name.endswith(".distcp"))


def import_checkpoint(
    source: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    name: str | None = None,
    run: str | None = None,
    step: int | None = None,
    allow_pickle: bool = False,
    force: bool = False,
    assume_ended: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> Imported:
    """Makes a step of a checkpoint. Collective: no; one process. Blocks: for reading it, twice, and writing it.

    The state is held in memory once, of a file only what is being copied.

    Args:
        source: the folder of a distributed checkpoint (of torch, or of Lightning with its ``meta.pt``), or a file of
            torch or Lightning; also a step of this library, such as an exported one.
        into: the folder of the job's checkpoints, its ``dirpath``; made when missing.
        name: name of the step in it; None: that of ``source``, ending in ".ckpt".
        run: name of the run; None: that of a job started like this process.
        step: number of the optimizer step; None: the checkpoint's ``global_step``.
        allow_pickle: also load objects of any class. Only for checkpoints you trust: it can run code.
        force: replace the file that has the name, and go on from this step in a run that has others.
        assume_ended: no other host uses ``into``, which this host cannot see.
        advance: called with the number of bytes read since the last call.

    Raises:
        ConfigError: ``into`` has something under the name; the run has steps; the step's number is not known; or an
            object needs ``allow_pickle``.
        NoCheckpointFound: ``source`` is no checkpoint, or its save did not end.
        CorruptShard: ``source`` is damaged; names the file. Nothing is saved.
        ResiliencyError: a job uses the run, or the save failed.
    """
    path, directory = os.path.abspath(source), os.path.abspath(into)
    name = name or os.path.splitext(os.path.basename(path))[0] + ".ckpt"
    _check_name(directory, name, force)
    run = run or environment().run
    _refuse_if_in_use(directory, run, assume_ended)
    if not force:
        _refuse_if_it_has_steps(directory, run)
    with pickle_errors(allow_pickle):
        state = _load(path, allow_pickle, advance)
    number = _step_of(state, path) if step is None else step
    with Checkpointer(
        LocalTierOptions(directory=directory, keep=None),
        run=run,
        rank=0,
        world_size=1,
        options=CheckpointerOptions(agent="embedded"),
    ) as engine:
        ticket = engine.save(number, state, names=[name], info={"imported_from": path})
        if ticket is None:
            raise ResiliencyError(f"{path} was not saved in {directory}; the log says why")
        deadline = timedelta(seconds=_SAVE_S + bytes_of(path) / _SAVE_BYTES_PER_S)
        ticket.wait(Stage.DURABLE if engine.can_be_durable else Stage.COMMITTED, timeout=deadline)
    found = read_name(LocalTier(directory), name)
    if found is None or found.id != ticket.id:
        raise ResiliencyError(
            f"{path} is {ticket.id} of run {run!r} in {directory} now, but could not have the name {name!r}; the"
            " log says why"
        )
    target = os.path.join(directory, name)
    return Imported(path=target, run=run, id=ticket.id, nbytes=os.stat(target).st_size)


def _check_name(directory: str, name: str, force: bool) -> None:
    target = os.path.join(directory, name)
    if os.path.isdir(target):
        raise ConfigError(f"{target} is a folder, and an imported step is a file; say another --name")
    if os.path.lexists(target) and not force:
        raise ConfigError(f"{target} exists; say another --name, or --force to replace it")


def _refuse_if_in_use(directory: str, run: str, assume_ended: bool) -> None:
    seen = [one for one in evidence_of_use(directory, run) if one.certain or not assume_ended]
    if seen:
        more = "" if any(one.certain for one in seen) else ", or say --assume-ended if that rank is gone"
        raise ResiliencyError(f"run {run!r} in {directory} is in use: {seen[0].text}. End the job first{more}")


def _refuse_if_it_has_steps(directory: str, run: str) -> None:
    """A step that a process saves without having loaded one is the newest of its run, whatever its number."""
    steps = [found.id.step for found in listings(LocalTier(directory), run) if is_committed(found)]
    if steps:
        raise ConfigError(
            f"run {run!r} in {directory} has step {steps[-1]} already, and a fit would go on from the imported one"
            " instead; say another --into or --run, or --force if it shall"
        )


def _load(path: str, allow_pickle: bool, advance: Callable[[int], None]) -> Any:
    if not os.path.exists(path):
        raise NoCheckpointFound(f"{path} does not exist")
    ours = locate_and_load(path, allow_pickle=allow_pickle)
    if ours is not None:
        state = ours[1]
    elif not os.path.isdir(path):
        state = load_stock_file(path, allow_pickle=allow_pickle, advance=advance)
    elif is_stock_folder(path):
        state = load_stock_folder(path, allow_pickle=allow_pickle, advance=advance)
    else:
        raise NoCheckpointFound(f"{path} has no files of a distributed checkpoint (.metadata, *.distcp)")
    return dumped_form(state, allow_pickle=allow_pickle) if isinstance(state, dict) else state


def _step_of(state: Any, path: str) -> int:
    found = state.get("global_step") if isinstance(state, Mapping) else None
    if not isinstance(found, int):
        raise ConfigError(f"{path} does not say at which step it was saved (no 'global_step'); say --step N")
    return found
