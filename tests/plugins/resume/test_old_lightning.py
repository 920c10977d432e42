"""What a Lightning before 2.5 does otherwise at a restart is repaired, or said; with stand-ins for its loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resiliency.plugins.resume import loop_repairs


class Loop(SimpleNamespace):
    """Knows no stages, as before 2.5."""

    def _should_check_val_fx(self, fetcher: Any) -> bool:
        return bool(self.validates)

    def _should_accumulate(self) -> bool:
        return False


def make_trainer(
    *, over: bool = False, validating: bool = False, by_steps: bool = False, validates: bool = False
) -> Any:
    """In ``on_train_epoch_end`` (``over``), ``on_validation_end`` or ``on_train_batch_end``."""
    inside = not (over or validating)
    batch = SimpleNamespace(ready=2, processed=2, completed=1 if inside else 2)

    def increment_completed() -> None:
        batch.completed += 1

    epoch_loop = Loop(
        batch_progress=SimpleNamespace(current=batch, increment_completed=increment_completed),
        val_loop=SimpleNamespace(restarting=True),
        restarting=True,
        validates=validates,
        _batches_that_stepped=1,
    )
    fit_loop = SimpleNamespace(
        epoch_loop=epoch_loop,
        epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=1 if over else 0, completed=0)),
        _iteration_based_training=lambda: by_steps,
        _data_fetcher=None,
    )
    return SimpleNamespace(
        fit_loop=fit_loop,
        validating=validating,
        sanity_checking=False,
        lightning_module=object(),
        state=SimpleNamespace(status="running"),
        _logger_connector=SimpleNamespace(_first_loop_iter=None),
    )


def test_what_cannot_be_repaired_is_said_at_the_save() -> None:
    said = loop_repairs.leaves_out_after_save(make_trainer(over=True, by_steps=True))
    assert said is not None and "before 2.5" in said and said.startswith("saved at the end of an epoch")


@pytest.mark.parametrize(
    "where",
    [{"over": True}, {"validating": True}, {"validates": True}, {"validating": True, "by_steps": True}],
    ids=str,
)
def test_nothing_is_said_of_what_is_repaired(where: dict[str, Any]) -> None:
    assert loop_repairs.leaves_out_after_save(make_trainer(**where)) is None


def test_the_last_validation_is_repeated_as_a_whole_and_known_to_be() -> None:
    assert loop_repairs.repeats_validation(make_trainer(validating=True))
    assert loop_repairs.repeats_validation(make_trainer(over=True))
    assert not loop_repairs.repeats_validation(make_trainer(validates=True))  # it is due then, and no repetition
    trainer = make_trainer(validating=True)
    assert loop_repairs.validates_at_restart(trainer)
    assert trainer.fit_loop.epoch_loop.val_loop.restarting is False


@pytest.mark.parametrize(("validates", "counted"), [(False, 2), (True, 1)])
def test_a_step_that_the_due_validation_counts_is_counted_once(validates: bool, counted: int) -> None:
    trainer = make_trainer(validates=validates)
    loop_repairs.count_saved_batch(trainer.fit_loop)
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed == 2
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == counted
