"""The guide's arguments of ``ModelCheckpoint``, checked. None always means: as the stock class has it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from resiliency.errors import ConfigError

__all__ = ["GuideArguments", "either_spelling"]


@dataclass(frozen=True, kw_only=True)
class GuideArguments:
    """Arguments of the guide this project implements; what each does is in :mod:`resiliency.callbacks._guide_effects`.

    Attributes:
        save_optim_on_train_end: False: the checkpoint at the end of training is saved without optimizer state.
        always_save_context: write what the training was made of beside every checkpoint.
        save_context_on_train_end: likewise, beside the last one.
        preprocess_files: note the command line and the state of the git repository in the Trainer's root folder.
        use_in_cluster_local_ckpts: there is a local tier, see :attr:`wants_local_tier` and :attr:`is_local_tier`.
        is_persistent_storage: which tier the callback saves to, where there is a local tier; None: to both.
        delete_unfinished_ckpt_on_start: delete checkpoints with a marker ``-unfinished`` at the start of a fit.
        priority: of several callbacks with different priorities, the higher one saves a step that both want.
    """

    save_optim_on_train_end: bool | None = None
    always_save_context: bool | None = None
    save_context_on_train_end: bool | None = None
    preprocess_files: bool | None = None
    use_in_cluster_local_ckpts: bool | None = None
    is_persistent_storage: bool | None = None
    enable_high_scale_ckpt: bool | None = None
    delete_unfinished_ckpt_on_start: bool | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "priority" and not isinstance(value, bool | None):
                raise TypeError(f"{field.name}={value!r} is a {type(value).__name__}; pass True, False or None")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise TypeError(f"priority={self.priority!r} is a {type(self.priority).__name__}; pass a whole number")
        if self.enable_high_scale_ckpt:
            raise ConfigError(
                "enable_high_scale_ckpt=True needs what talks to the GKE replicator (replicator.yaml and"
                " *.restore files in"
                " /local), which this version does not have; without it, pass local_dir='/local/<job>' and a"
                " dirpath= that"
                " all hosts see: saves go to the ramdisk first, and are uploaded"
            )

    @property
    def wants_local_tier(self) -> bool:
        """True when the callback is to save to a local folder first, and to ``dirpath`` from there."""
        return bool(self.use_in_cluster_local_ckpts) and self.is_persistent_storage is None

    @property
    def is_local_tier(self) -> bool:
        """True when ``dirpath`` is a folder of the local tier."""
        return bool(self.use_in_cluster_local_ckpts) and self.is_persistent_storage is False


def either_spelling(right: bool | None, misspelt: bool | None) -> bool | None:
    """``save_optim_on_train_end``, which the guide's example calls ``save_optim_on_train_ends``.

    Raises:
        ConfigError: both are given, and differ.
    """
    if right is not None and misspelt is not None and right != misspelt:
        raise ConfigError(
            f"save_optim_on_train_end={right} and save_optim_on_train_ends={misspelt} are one argument; pass the first"
        )
    return misspelt if right is None else right
