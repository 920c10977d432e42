"""Checks the guide's arguments of ``ModelCheckpoint``. For each of them, None means the stock class's behaviour."""

from __future__ import annotations

from dataclasses import dataclass, fields

from resiliency.errors import ConfigError

__all__ = ["GuideArguments", "either_spelling"]


@dataclass(frozen=True, kw_only=True)
class GuideArguments:
    """The arguments of ``ModelCheckpoint`` in the guide that this project implements.

    :mod:`resiliency.callbacks._guide_effects` does what they ask for.

    Attributes:
        save_optim_on_train_end: False: the checkpoint at the end of training is saved without optimizer state.
        always_save_context: describe the training in a folder beside every checkpoint.
        save_context_on_train_end: the same, only beside the last checkpoint.
        preprocess_files: write the command line and the state of the git repository to the Trainer's root folder.
        use_in_cluster_local_ckpts: the job uses a local tier; see :attr:`wants_local_tier` and :attr:`is_local_tier`.
        is_persistent_storage: with a local tier, the tier that the callback saves to: True: the persistent one; False:
            the local one; None: both.
        enable_high_scale_ckpt: True raises ConfigError, because it is not implemented.
        delete_unfinished_ckpt_on_start: delete checkpoints with an ``-unfinished`` marker at the start of a fit.
        priority: when several callbacks want to save the same step, the one with the highest priority saves it.
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
        """True when the callback must save to a local folder first and upload from there to ``dirpath``."""
        return bool(self.use_in_cluster_local_ckpts) and self.is_persistent_storage is None

    @property
    def is_local_tier(self) -> bool:
        """True when ``dirpath`` is a folder of the local tier."""
        return bool(self.use_in_cluster_local_ckpts) and self.is_persistent_storage is False


def either_spelling(right: bool | None, misspelt: bool | None) -> bool | None:
    """The value of ``save_optim_on_train_end``, which the guide's example spells ``save_optim_on_train_ends``.

    Raises:
        ConfigError: both are given, and differ.
    """
    if right is not None and misspelt is not None and right != misspelt:
        raise ConfigError(
            f"save_optim_on_train_end={right} and save_optim_on_train_ends={misspelt} are one argument; pass the first"
        )
    return misspelt if right is None else right
