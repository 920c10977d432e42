"""A callback of ``LightningModule.configure_callbacks`` finds what one that is passed to the Trainer finds. Lightning looks
for "last" before it attaches it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import EITHER, differences, loader, make_net, make_trainer, ours, stock, weights
from tests.callbacks.test_ddp import run
from tests.rings import few

SAVES: dict[str, Any] = {"every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}", "save_last": True}
BEST: dict[str, Any] = {"monitor": "val_loss", "filename": "best", "save_last": True}

#: Lightning has looked where no callback was yet, and says so.
pytestmark = pytest.mark.filterwarnings(r'ignore:.*ckpt_path="last".* is set, but there is no last checkpoint')


def make(namespace: str, via: str, callback: Any, *, root: Path, **settings: Any) -> tuple[Any, Any]:
    """A trainer and a module, one of which has the callback."""
    net = make_net(namespace, dropout=0.3)
    if via == "module":
        net.configure_callbacks = lambda: [callback]
    trainer = make_trainer(namespace, [callback] if via == "trainer" else [], root=root, **settings)
    return trainer, net


def fit(
    namespace: str, via: str, directory: Path, *, max_steps: int, ckpt_path: Any = None, **arguments: Any
) -> tuple[Any, Any]:
    callback = ours(namespace, directory, **(SAVES | arguments))
    trainer, net = make(namespace, via, callback, root=directory, max_steps=max_steps, max_epochs=-1)
    torch.manual_seed(3)
    trainer.fit(net, loader(shuffle=True), loader(batches=1), ckpt_path=ckpt_path)
    return trainer, net


@pytest.mark.parametrize("save_last", few([True, None], [None]))
@pytest.mark.parametrize("via", ["module", "trainer"])
@pytest.mark.parametrize("namespace", EITHER)
def test_last_is_the_newest_step(namespace: str, via: str, save_last: bool | None, tmp_path: Path) -> None:
    straight = fit(namespace, via, tmp_path / "straight", max_steps=10)[1]
    fit(namespace, via, tmp_path / "run", max_steps=8, save_last=save_last)
    trainer, net = fit(namespace, via, tmp_path / "run", max_steps=10, save_last=save_last, ckpt_path="last")
    assert (net.ran, trainer.global_step) == (2, 10)
    assert differences(weights(straight), weights(net)) == []


@pytest.mark.parametrize("via", ["module", "trainer"])
@pytest.mark.parametrize("verb", few(["validate", "test", "predict"], ["validate"]))
@pytest.mark.parametrize("namespace", EITHER)
def test_last_is_found_without_a_fit(namespace: str, verb: str, via: str, tmp_path: Path) -> None:
    expected = weights(fit(namespace, via, tmp_path, max_steps=8)[1])
    trainer, net = make(namespace, via, ours(namespace, tmp_path, **SAVES), root=tmp_path)
    assert differences(expected, weights(net)) != []
    getattr(trainer, verb)(net, loader(batches=1), ckpt_path="last")
    assert differences(expected, weights(net)) == []
    # Nothing of it is left for the next run of this trainer.
    other = make_net(namespace)
    before = weights(other)
    getattr(trainer, verb)(other, loader(batches=1))
    assert differences(before, weights(other)) == []


@pytest.mark.parametrize("make_callback", [stock, ours])
@pytest.mark.parametrize("via", ["module", "trainer"])
@pytest.mark.parametrize("verb", few(["validate", "test", "predict"], ["validate"]))
@pytest.mark.parametrize("namespace", EITHER)
def test_best_is_found_after_a_fit_and_raises_before_it_as_with_the_stock_class(
    namespace: str, verb: str, via: str, make_callback: Any, tmp_path: Path
) -> None:
    made = stock(namespace)(tmp_path, **BEST) if make_callback is stock else ours(namespace, tmp_path, **BEST)
    trainer, net = make(namespace, via, made, root=tmp_path)
    with pytest.raises(ValueError, match=r'ckpt_path="best"'):
        getattr(trainer, verb)(net, loader(batches=1), ckpt_path="best")
    trainer.fit(net, loader(), loader(batches=1))
    best = dict(torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    getattr(trainer, verb)(net, loader(batches=1), ckpt_path="best")
    assert differences(best, weights(net)) == []
    with torch.no_grad():
        net.layers[0].weight.zero_()
    getattr(trainer, verb)(net, loader(batches=1), ckpt_path="last")
    assert differences(dict(torch.load(tmp_path / "last.ckpt")["state_dict"]), weights(net)) == []


@pytest.mark.parametrize("namespace", EITHER)
def test_a_path_that_is_named_is_taken_whatever_is_newer(namespace: str, tmp_path: Path) -> None:
    fit(namespace, "module", tmp_path, max_steps=8)
    path = tmp_path / "step=4.ckpt"
    assert fit(namespace, "module", tmp_path, max_steps=10, ckpt_path=path, auto_resume=True)[1].ran == 6
    callback = ours(namespace, tmp_path, auto_resume=True, **SAVES)
    trainer, net = make(namespace, "module", callback, root=tmp_path, max_steps=10)
    trainer.ckpt_path = path  # the other way to name one
    trainer.fit(net, loader(), loader(batches=1))
    assert net.ran == 6


@pytest.mark.parametrize("namespace", EITHER)
def test_what_lightning_makes_of_an_exception_is_taken_unless_a_later_step_is_there(
    namespace: str, tmp_path: Path
) -> None:
    """With its OnExceptionCheckpoint a fit without a path goes on from "last"."""
    fit(namespace, "trainer", tmp_path, max_steps=8)
    trainer, net = make(namespace, "trainer", ours(namespace, tmp_path, **SAVES), root=tmp_path, max_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = __import__(f"{namespace}.callbacks", fromlist=["OnExceptionCheckpoint"])
        trainer.callbacks.insert(0, module.OnExceptionCheckpoint(tmp_path / "exception"))
        trainer.fit(net, loader(), loader(batches=1))
    assert net.ran == 2


def test_both_ranks_find_the_newest_step(zygote: Zygote, tmp_path: Path) -> None:
    straight = run(zygote, tmp_path / "straight", max_steps=9, launcher=False)
    run(zygote, tmp_path / "run", max_steps=6, launcher=False, via_module=True)
    again = run(zygote, tmp_path / "run", max_steps=9, launcher=False, via_module=True, ckpt_path="last")
    assert [(answer["error"], answer["ran"]) for answer in again] == [("", 3), ("", 3)]
    assert [answer["hash"] for answer in again] == [answer["hash"] for answer in straight]
