"""What callbacks must know of NeMo's own ``ModelCheckpoint`` to work beside it. Does not import NeMo."""

from __future__ import annotations

from typing import Any

__all__ = ["is_nemos", "nemo_checkpoint", "save_last"]


def is_nemos(thing: Any) -> bool:
    """True for an object of a class of NeMo's, or of one derived from it."""
    return any(cls.__module__.startswith("nemo.lightning.") for cls in type(thing).__mro__)


def nemo_checkpoint(trainer: Any) -> Any:
    """NeMo's ``ModelCheckpoint`` of a Trainer, after whose rules ``AutoResume`` resumes; None when it has none."""
    return next((one for one in trainer.checkpoint_callbacks if is_nemos(one)), None)


def save_last(trainer: Any, callback: Any) -> str:
    """Saves the checkpoint ``-last`` of NeMo's callback now, and waits until it is finished. Returns its path; "" when
    there is none, because the callback keeps none, or because the save has failed, which was logged.

    Collective: yes. Blocks: until the step is committed.
    """
    if trainer.global_step != callback._last_global_step_saved:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
    finalize = getattr(trainer.strategy.checkpoint_io, "maybe_finalize_save_checkpoint", None)
    if finalize is not None:
        finalize(blocking=True)
    path = str(callback.last_model_path or "")
    return "" if not path or callback.is_checkpoint_unfinished(path) else path
