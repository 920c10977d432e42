"""Saves and restores what a training has changed about which parts of its module train.

Lightning saves weights, but not which of them train. A layer that a hook has unfrozen, a module that it has put into
eval mode and a parameter group that it has added to an optimizer are as the script made them after a restart.

Only changes since the start of training are saved, so that a script that was changed between two starts keeps its say
in everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

__all__ = ["KEY", "Trainable"]

log = logging.getLogger(__name__)

#: Key of the changes in a checkpoint, where it is only when there are any. They are the same on all ranks.
KEY = "resiliency_trainable"

#: An optimizer's parameter groups: the names of the parameters of each.
_Groups = list[list[str]]


class Trainable:
    """Knows what of one fit's module trains, and what has changed of that. Thread: training. Collective: no.

    ``saved``: the changes that a loaded checkpoint holds; {}: none.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self._flags: dict[str, bool] = saved.get("flags", {})
        self._saved_groups: dict[str, _Groups] = saved.get("groups", {})
        self._replaced: dict[str, bool] = {}  # what :meth:`restore` has found
        self._start: list[tuple[str, Any, str, bool]] = []  # name, owner, attribute and value of each flag
        self._start_groups: list[list[list[int]]] = []
        self._began = False
        self._training: dict[str, bool] = {}  # the modes before the validation that is running

    def changes(self, trainer: Any) -> dict[str, Any]:
        """What has changed since the start, as plain data; {} when nothing has. Blocks: 0.1 microseconds per flag."""
        flags, groups = self._flags, self._saved_groups
        if self._began:
            flags, groups = self._changed_flags(), self._changed_groups(trainer)
        return {"flags": flags, "groups": groups} if flags or groups else {}

    def _changed_flags(self) -> dict[str, bool]:
        now = ((name, self._training.get(name, getattr(owner, flag)), was) for name, owner, flag, was in self._start)
        return {name: value for name, value, was in now if value != was}

    def _changed_groups(self, trainer: Any) -> dict[str, _Groups]:
        """The groups of the optimizers whose groups have changed. One with parameters of others is left out."""
        found: dict[str, _Groups] = {}
        names: dict[int, str] = {}
        for index, (optimizer, start) in enumerate(zip(trainer.optimizers, self._start_groups, strict=False)):
            groups = _ids(optimizer)
            if groups != start:
                names = names or {id(p): name for name, p in trainer.lightning_module.named_parameters()}
                if all(each in names for group in groups for each in group):
                    found[str(index)] = [[names[each] for each in group] for group in groups]
        return found

    def restore(self, trainer: Any) -> None:
        """Restores which parameters train, and the optimizers' parameter groups, before the state of the optimizers is
        loaded."""
        self._start_groups = [_ids(optimizer) for optimizer in trainer.optimizers]
        missing = set(self._flags)
        for name, owner, flag in _flags_of(trainer.lightning_module):
            missing.discard(name)
            if name in self._flags and flag == "requires_grad":
                self._replaced[name] = getattr(owner, flag)
                setattr(owner, flag, self._flags[name])
        parameters = dict(trainer.lightning_module.named_parameters())
        for index, groups in self._saved_groups.items():
            unknown = {name for group in groups for name in group} - set(parameters)
            if not unknown and int(index) < len(trainer.optimizers):
                _set_groups(trainer.optimizers[int(index)], [[parameters[name] for name in group] for group in groups])
            missing |= unknown
        if missing:
            log.warning(
                "exact resume: the module has no longer %s: that it was frozen, unfrozen, put into another mode or"
                " given to an optimizer while it trained is not restored; nothing else is left out",
                ", ".join(sorted(missing)),
            )

    def begin(self, trainer: Any) -> None:
        """Restores all flags, which hooks of the start may have changed, and notes from where training has begun.

        Not before: Lightning warns of modules that are in eval mode at the start. Call it after those hooks, in every
        epoch; only the first call of a fit has an effect.
        """
        if self._began:
            return
        self._began = True
        for name, owner, flag in _flags_of(trainer.lightning_module):
            value = getattr(owner, flag)
            if name in self._replaced and value == self._flags[name]:
                value = self._replaced[name]  # no hook has set it since restore()
            self._start.append((name, owner, flag, value))
            if name in self._flags:
                setattr(owner, flag, self._flags[name])

    def validation_begins(self) -> None:
        """Notes the modes of all modules. Lightning puts them all into eval mode now, and back at the end, so a save
        within the validation must not take those of that moment."""
        self._training = {name: getattr(owner, flag) for name, owner, flag, _ in self._start if flag == "training"}

    def validation_ended(self) -> None:
        self._training = {}


def _flags_of(module: Module) -> Iterator[tuple[str, Any, str]]:
    """Name, owner and attribute of each flag that decides what trains."""
    for name, parameter in module.named_parameters():
        yield f"{name}.requires_grad", parameter, "requires_grad"
    for name, part in module.named_modules():
        for flag in ("training", "track_running_stats"):  # Lightning's fine-tuning callbacks change the second, too
            if isinstance(getattr(part, flag, None), bool):
                yield f"{name}.{flag}".lstrip("."), part, flag


def _ids(optimizer: Any) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in getattr(optimizer, "param_groups", ())]


def _set_groups(optimizer: Any, groups: list[list[Any]]) -> None:
    """Gives the optimizer these groups. Their other settings come with the optimizer's state."""
    old = optimizer.param_groups
    settings = [*old, *[optimizer.defaults] * len(groups)]
    old[:] = [{**each, "params": parameters} for each, parameters in zip(settings, groups, strict=False)]
