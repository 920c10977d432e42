"""What a training has changed about what trains is as it was after a resume: in the middle of an epoch, after an epoch,
within a validation, and in a resume of a resume."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from tests.callbacks.harness import EITHER, content, differences, loader, make_trainer, ours, weights
from tests.rings import few

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
PL = "lightning.pytorch"
EPOCHS, BATCHES = 4, 4
#: Each step is saved, and nothing is removed.
EVERY: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", "save_last": True}

#: Called in a hook with the module and the number of the epoch.
Action = Callable[[Any, int], None]


def nothing(module: Any, epoch: int) -> None: ...


def make_net(
    namespace: str,
    *,
    built: Callable[[Any], object] = lambda _: None,
    optimized: Callable[[Any], Any] = lambda module: module.parameters(),
    train_start: Action = nothing,
    epoch_start: Action = nothing,
    validated: Action = nothing,
) -> Any:
    """A module with BatchNorm and dropout, with the user's code at the places of the arguments."""

    class Net(importlib.import_module(namespace).LightningModule):  # type: ignore[name-defined,misc]
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
            self.head = nn.Linear(8, 1)
            self.flags: list[Any] = []
            built(self)

        def on_train_start(self) -> None:
            train_start(self, self.current_epoch)

        def on_train_epoch_start(self) -> None:
            epoch_start(self, self.current_epoch)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.flags.append(
                (
                    [p.requires_grad for p in self.parameters()],
                    [(m.training, getattr(m, "track_running_stats", None)) for m in self.backbone],
                )
            )
            return self.head(self.backbone(batch[0])).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.head(self.backbone(batch[0])).square().mean())

        def on_validation_epoch_end(self) -> None:
            validated(self, self.current_epoch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(optimized(self), lr=0.05)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)}

    torch.manual_seed(5)
    return Net()


def fit(namespace: str, directory: Path, net: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
    arguments = EVERY | settings.pop("arguments", {})
    callbacks = (*callbacks, ours(namespace, directory, **arguments))
    trainer = make_trainer(namespace, callbacks, root=directory, **({"max_epochs": EPOCHS} | settings))
    torch.manual_seed(7)
    trainer.fit(net, loader(batches=BATCHES, shuffle=True), loader(batches=1), ckpt_path=ckpt_path)
    return trainer


def freeze_backbone(module: Any, epoch: int = 0) -> None:
    module.backbone.requires_grad_(False)


def unfreeze_at_1(module: Any, epoch: int) -> None:
    if epoch == 1:
        module.backbone.requires_grad_(True)


def freeze_at_1(module: Any, epoch: int) -> None:
    if epoch == 1:
        module.backbone[0].requires_grad_(False)


def back_and_forth(module: Any, epoch: int) -> None:
    module.head.requires_grad_(epoch % 2 == 0)


def eval_at_1(module: Any, epoch: int) -> None:
    if epoch == 1:
        module.backbone.eval()


def train_again_at_2(module: Any, epoch: int) -> None:
    if epoch in (1, 2):
        module.backbone.train(epoch == 2)


def add_group_at_1(module: Any, epoch: int) -> None:
    if epoch == 1:
        module.backbone.requires_grad_(True)
        module.trainer.optimizers[0].add_param_group({"params": list(module.backbone.parameters()), "lr": 0.01})


def freeze_statistics(module: Any) -> None:
    BaseFinetuning.freeze(module.backbone, train_bn=False)


def unfreeze_statistics_at_1(module: Any, epoch: int) -> None:
    if epoch == 1:
        BaseFinetuning.make_trainable(module.backbone)


def head_only(module: Any) -> Any:
    return [p for p in module.parameters() if p.requires_grad]


#: name -> arguments of make_net
CASES: dict[str, dict[str, Any]] = {
    "unfrozen by a hook": {"built": freeze_backbone, "epoch_start": unfreeze_at_1},
    "unfrozen by a hook, frozen by one of the start": {"train_start": freeze_backbone, "epoch_start": unfreeze_at_1},
    "unfrozen in a validation": {"built": freeze_backbone, "validated": unfreeze_at_1},
    "frozen by a hook": {"epoch_start": freeze_at_1},
    "frozen and unfrozen": {"epoch_start": back_and_forth},
    "eval mode": {"epoch_start": eval_at_1},
    "eval mode for an epoch": {"epoch_start": train_again_at_2},
    "running statistics": {"built": freeze_statistics, "epoch_start": unfreeze_statistics_at_1},
    "a parameter group": {"built": freeze_backbone, "optimized": head_only, "epoch_start": add_group_at_1},
}


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize(
    "name", few(CASES, ["unfrozen by a hook", "eval mode for an epoch", "running statistics", "a parameter group"])
)
def test_a_resumed_run_trains_what_the_uninterrupted_one_trains(name: str, namespace: str, tmp_path: Path) -> None:
    straight = make_net(namespace, **CASES[name])
    fit(namespace, tmp_path / "straight", straight)
    assert len({str(flags) for flags in straight.flags}) > 1, "the case changes something"
    for step in (4, 5, 8):
        net = make_net(namespace, **CASES[name])
        fit(namespace, tmp_path / f"from-{step}", net, ckpt_path=tmp_path / "straight" / f"step={step}.ckpt")
        assert net.flags == straight.flags[step:]
        assert differences(weights(straight), weights(net)) == []
    again = make_net(namespace, **CASES[name])  # a resume of a resume
    fit(namespace, tmp_path / "again", again, ckpt_path=tmp_path / "from-5" / "step=9.ckpt")
    assert again.flags == straight.flags[9:]
    assert differences(weights(straight), weights(again)) == []


@pytest.mark.parametrize("train_bn", few([True, False], [False]))
@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
def test_a_backbone_that_lightnings_callback_has_unfrozen_trains_on(
    namespace: str, train_bn: bool, tmp_path: Path
) -> None:
    def finetuning() -> Any:
        found = importlib.import_module(f"{namespace}.callbacks").BackboneFinetuning
        return found(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, train_bn=train_bn, verbose=False)

    straight = make_net(namespace, optimized=head_only)
    trainer = fit(namespace, tmp_path / "straight", straight, finetuning())
    for step in (3, 6, 8):
        net = make_net(namespace, optimized=head_only)
        path = tmp_path / "straight" / f"step={step}.ckpt"
        resumed = fit(namespace, tmp_path / f"from-{step}", net, finetuning(), ckpt_path=path)
        assert net.flags == straight.flags[step:]
        assert differences(weights(straight), weights(net)) == []
        assert differences(trainer.optimizers[0].state_dict(), resumed.optimizers[0].state_dict()) == []


@pytest.mark.parametrize("namespace", EITHER)
def test_a_save_in_a_validation_has_the_modes_of_training(namespace: str, tmp_path: Path) -> None:
    monitored = {"every_n_train_steps": None, "monitor": "val", "every_n_epochs": 1}
    straight = make_net(namespace, epoch_start=eval_at_1)
    fit(namespace, tmp_path / "straight", straight, arguments=monitored, val_check_interval=2)
    for step in (2, 6, 8):
        net = make_net(namespace, epoch_start=eval_at_1)
        path = tmp_path / "straight" / f"step={step}.ckpt"
        fit(namespace, tmp_path / f"from-{step}", net, arguments=monitored, val_check_interval=2, ckpt_path=path)
        assert net.flags == straight.flags[step:]
        assert differences(weights(straight), weights(net)) == []


def test_a_save_after_an_exception_in_a_validation_has_the_modes_of_training(tmp_path: Path) -> None:
    def fails(module: Any, epoch: int) -> None:
        if epoch == 1:
            raise ZeroDivisionError

    rarely = {"every_n_train_steps": 1000, "save_on_exception": True}
    straight = make_net(PL, epoch_start=eval_at_1)
    fit(PL, tmp_path / "straight", straight)
    with pytest.raises(ZeroDivisionError):
        fit(
            PL,
            tmp_path / "run",
            make_net(PL, epoch_start=eval_at_1, validated=fails),
            arguments=rarely,
        )
    net = make_net(PL, epoch_start=eval_at_1)
    fit(PL, tmp_path / "run", net, ckpt_path="last", arguments=rarely)
    assert net.flags == straight.flags[8:]


def test_a_checkpoint_of_a_run_that_changes_nothing_says_nothing(tmp_path: Path) -> None:
    fit(PL, tmp_path, make_net(PL, built=freeze_backbone), max_epochs=1)
    assert not [key for key in content(tmp_path / "last.ckpt") if "trainable" in key]


def test_a_script_that_was_changed_keeps_its_say_in_what_the_training_has_not_changed(tmp_path: Path) -> None:
    def freeze_all(module: Any) -> None:
        module.requires_grad_(False)
        module.head.bias.requires_grad_(True)

    fit(PL, tmp_path, make_net(PL, built=freeze_backbone, epoch_start=unfreeze_at_1), max_epochs=2)
    net = make_net(PL, built=freeze_all, epoch_start=unfreeze_at_1)
    fit(PL, tmp_path, net, max_epochs=3, ckpt_path="last")
    trains = dict(zip((name for name, _ in net.named_parameters()), net.flags[0][0], strict=True))
    assert trains.pop("head.weight") is False, "frozen in the new script"
    assert all(trains.values()), "the backbone was unfrozen by the training"


def test_what_is_no_longer_in_the_module_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer that cannot get its groups back raises, as in stock Lightning; so this one never had the layer."""

    def with_extra(module: Any) -> None:
        module.extra = nn.Linear(2, 2).requires_grad_(False)
        freeze_backbone(module)

    def unfreeze_both(module: Any, epoch: int) -> None:
        unfreeze_at_1(module, epoch)
        if epoch == 1 and hasattr(module, "extra"):
            module.extra.requires_grad_(True)

    def without_extra(module: Any) -> Any:
        return [*module.backbone.parameters(), *module.head.parameters()]

    net = make_net(PL, built=with_extra, optimized=without_extra, epoch_start=unfreeze_both)
    fit(PL, tmp_path, net, max_epochs=2)
    caplog.clear()
    net = make_net(PL, built=freeze_backbone, optimized=without_extra, epoch_start=unfreeze_both)
    fit(PL, tmp_path, net, max_epochs=3, ckpt_path="last")
    (said,) = [record.getMessage() for record in caplog.records if "no longer" in record.getMessage()]
    assert "extra.bias.requires_grad, extra.weight.requires_grad:" in said
    assert all(net.flags[0][0]), "all that is there is restored"


def test_a_checkpoint_from_before_and_one_of_the_stock_class_are_resumed(tmp_path: Path) -> None:
    fit(PL, tmp_path, make_net(PL, epoch_start=freeze_at_1), max_epochs=2)
    state = content(tmp_path / "last.ckpt")
    del state["resiliency_trainable"]
    torch.save(state, tmp_path / "older.ckpt")
    net = make_net(PL)
    trainer = fit(PL, tmp_path / "next", net, max_epochs=3, ckpt_path=tmp_path / "older.ckpt")
    assert trainer.global_step == 3 * BATCHES and all(net.flags[0][0])
