"""The same training once with the stock callback and once with ours: everything a user can see afterwards is equal."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.callbacks.model_checkpoint import build
from tests.callbacks.harness import (
    EMBEDDED,
    NAMESPACES,
    content,
    differences,
    loader,
    make_net,
    make_trainer,
    names,
    ours,
    state_of,
    stock,
)

#: name -> (arguments of each callback, settings of the Trainer, settings of the module)
Case = tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "default": ([{}], {}, {}),
    "every_steps_one": ([{"every_n_train_steps": 2}], {}, {}),
    "every_steps_all": ([{"every_n_train_steps": 5, "save_top_k": -1}], {}, {}),
    "nothing": ([{"save_top_k": 0, "every_n_train_steps": 2}], {}, {}),
    "nothing_but_last": ([{"save_top_k": 0, "save_last": True, "every_n_train_steps": 2}], {}, {}),
    "max_one": (
        [{"monitor": "step", "mode": "max", "save_top_k": 1, "every_n_train_steps": 5, "filename": "{step}"}],
        {},
        {},
    ),
    "min_best": (
        [{"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1, "filename": "{step}-{wave:.1f}"}],
        {},
        {},
    ),
    "max_best_last": (
        [{"monitor": "wave", "mode": "max", "save_top_k": 3, "every_n_train_steps": 1, "save_last": True}],
        {},
        {},
    ),
    "all_monitored": ([{"monitor": "wave", "save_top_k": -1, "every_n_train_steps": 4}], {}, {}),
    "epochs": ([{"every_n_epochs": 2, "save_top_k": -1}], {"max_epochs": 4}, {}),
    "epoch_end": (
        [{"monitor": "train_loss", "save_on_train_epoch_end": True, "save_last": True}],
        {"max_epochs": 3},
        {},
    ),
    "not_epoch_end": ([{"save_on_train_epoch_end": False, "every_n_epochs": 1, "save_top_k": -1}], {}, {}),
    "clock": ([{"train_time_interval": timedelta(0), "save_top_k": -1}], {}, {}),
    "clock_never": ([{"train_time_interval": timedelta(days=1), "save_last": True}], {}, {}),
    "last": ([{"every_n_train_steps": 3, "save_last": True}], {}, {}),
    "link": ([{"every_n_train_steps": 3, "save_last": "link", "save_top_k": 1}], {}, {}),
    "link_best": ([{"monitor": "wave", "every_n_train_steps": 1, "save_last": "link", "save_top_k": 2}], {}, {}),
    "link_epochs": ([{"save_last": "link", "save_top_k": -1}], {"max_epochs": 3}, {}),
    "validation_metric": (
        [{"monitor": "val_wave", "mode": "max", "save_top_k": 2, "save_last": True}],
        {"max_epochs": 4},
        {},
    ),
    "validation_deferred": (
        [{"monitor": "val_wave", "every_n_train_steps": 2, "save_top_k": 2, "save_last": True}],
        {"val_check_interval": 3, "max_epochs": 3},
        {},
    ),
    "validation_in_between": ([{"save_top_k": -1, "save_last": True}], {"val_check_interval": 2}, {}),
    "validation_every_second": ([{"save_top_k": -1}], {"check_val_every_n_epoch": 2, "max_epochs": 4}, {}),
    "template": (
        [{"filename": "e-{epoch:02d}-{train_loss:.3f}-{missing:d}", "every_n_train_steps": 4, "save_top_k": -1}],
        {},
        {},
    ),
    "template_plain": (
        [
            {
                "filename": "e{epoch}_s{step}",
                "auto_insert_metric_name": False,
                "every_n_train_steps": 4,
                "save_top_k": -1,
            }
        ],
        {},
        {},
    ),
    "same_name": ([{"filename": "same", "every_n_train_steps": 2, "save_top_k": -1, "save_last": True}], {}, {}),
    "same_name_over": (
        [{"filename": "same", "every_n_train_steps": 2, "enable_version_counter": False, "save_last": True}],
        {},
        {},
    ),
    "same_name_best": ([{"filename": "x", "monitor": "wave", "every_n_train_steps": 1, "save_top_k": 3}], {}, {}),
    "weights_only": ([{"save_weights_only": True, "every_n_train_steps": 4, "save_last": True}], {}, {}),
    "manual_wrapped": ([{"every_n_train_steps": 4, "save_top_k": -1}], {}, {"manual": "wrapped"}),
    "accumulate": (
        [{"every_n_train_steps": 1, "save_top_k": -1, "save_last": True}],
        {"accumulate_grad_batches": 4},
        {},
    ),
    "accumulate_best": (
        [{"monitor": "wave", "every_n_train_steps": 1, "save_top_k": 2}],
        {"accumulate_grad_batches": 2, "max_epochs": 3},
        {},
    ),
    "accumulate_best_last": (
        [{"monitor": "wave", "mode": "max", "every_n_train_steps": 1, "save_top_k": 1, "save_last": True}],
        {"accumulate_grad_batches": 4, "max_epochs": 3},
        {},
    ),
    "max_steps": ([{"every_n_train_steps": 2, "save_last": True}], {"max_steps": 7, "max_epochs": -1}, {}),
    "two_dirs": ([{"every_n_train_steps": 2}, {"dirpath": "other", "monitor": "wave", "save_top_k": 2}], {}, {}),
    "two_in_one": (
        [
            {"every_n_train_steps": 2, "filename": "a-{step}"},
            {"monitor": "wave", "filename": "b-{step}", "save_top_k": 2, "every_n_train_steps": 1},
        ],
        {},
        {},
    ),
    "two_same_names": (
        [{"every_n_train_steps": 3, "save_top_k": -1}, {"every_n_epochs": 1, "save_top_k": -1, "save_last": True}],
        {},
        {},
    ),
    "weights_beside_full": (
        [
            {"every_n_train_steps": 3, "save_last": True},
            {"every_n_train_steps": 2, "save_weights_only": True, "filename": "w-{step}", "save_top_k": -1},
        ],
        {},
        {},
    ),
}


def train(namespace: str, root: Path, case: Case, *, own: bool, **more: Any) -> tuple[Any, list[Any], Any]:
    arguments, settings, module = case
    callbacks = []
    for item in arguments:
        where = root / item.get("dirpath", "ckpts")
        extra = {"dirpath": where, **({"options": EMBEDDED} if own else {})}
        callbacks.append((build if own else stock)(namespace)(**(item | extra)))
    trainer = make_trainer(namespace, callbacks, root=root, **settings)
    net = make_net(namespace, **module)
    torch.manual_seed(1)
    trainer.fit(net, loader(), loader(batches=2), **more)
    return trainer, callbacks, net


def pair(
    namespace: str, tmp_path: Path, case: Case
) -> tuple[tuple[Any, list[Any], Any], tuple[Any, list[Any], Any], Path, Path]:
    """Both trainings, each in a folder of the same name: paths are part of what is compared."""
    root, kept = tmp_path / "run", tmp_path / "stock"
    root.mkdir()
    theirs = train(namespace, root, case, own=False)
    root.rename(kept)
    return theirs, train(namespace, root, case, own=True), kept, root


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize("name", CASES)
def test_names_states_and_bytes_are_those_of_the_stock_class(name: str, tmp_path: Path) -> None:
    namespace = NAMESPACES[list(CASES).index(name) % 2]
    (_, theirs, _), (_, mine, net), kept, root = pair(namespace, tmp_path, CASES[name])

    for a, b in zip(theirs, mine, strict=True):
        assert differences(state_of(a), state_of(b)) == []
    assert names(root) == names(kept)
    for path in sorted(names(root)):
        expected, found = content(kept / path), content(root / path)
        # The stock class writes twice: its first file does not know yet what the second is called.
        for state in (expected, found):
            for callback in state.get("callbacks", {}).values():
                if not path.startswith("last"):
                    callback.pop("last_model_path", None)
        assert differences(expected, found) == [], path
    assert names(root) or name in ("nothing", "clock_never")


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    a = {"x": torch.tensor([1.0, 2.0]), "y": [1, (2,)]}
    assert differences(a, {"x": torch.tensor([1.0, 2.0]), "y": [1, (2,)]}) == []
    assert differences(a, {"x": torch.tensor([1.0, 2.0 + 2**-22]), "y": [1, (2,)]}) != []
    assert differences(a, {"x": torch.tensor([1.0, 2.0]), "y": [1, [2]]}) != []


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_pre_optimizer_weights_of_manual_optimisation_are_saved_as_stock_saves_them(
    namespace: str, tmp_path: Path
) -> None:
    """Since 2.6 the stock class saves weights the module put aside before its optimizer step."""

    def training(net: Any) -> Any:
        step = net.training_step

        def keep(batch: Any, batch_idx: int) -> Any:
            net.layer, net.saved_models = net.layers, getattr(net, "saved_models", {})
            net.saved_models[net.trainer.global_step] = {
                k: v.detach().clone() for k, v in net.layers.state_dict().items()
            }
            return step(batch, batch_idx)

        net.training_step = keep
        return net

    results = []
    for own in (False, True):
        root = tmp_path / "run"
        callback = (ours if own else lambda ns, d, **k: stock(ns)(d, **k))(
            namespace, root, every_n_train_steps=4, save_top_k=-1
        )
        trainer = make_trainer(namespace, [callback], root=root)
        torch.manual_seed(1)
        trainer.fit(training(make_net(namespace, manual="wrapped")), loader())
        results.append({name: content(root / name)["state_dict"] for name in sorted(names(root))})
        root.rename(tmp_path / f"own-{own}")
    assert len(results[0]) == 3
    assert differences(*results) == []


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_stock_states_come_into_ours_and_back(namespace: str, tmp_path: Path) -> None:
    """A run changes from the stock class to ours, and an exported checkpoint of it back."""
    arguments = {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1, "save_last": True}
    case: Case = ([arguments], {}, {})
    root = tmp_path / "run"
    _, (first,), _ = train(namespace, root, case, own=False)
    last = str(root / "ckpts" / "last.ckpt")

    longer: Case = ([arguments], {"max_epochs": 3}, {})
    _, (second,), _ = train(namespace, root, longer, own=True, ckpt_path=last)
    assert set(second.best_k_models) >= {path for path in first.best_k_models if Path(path).exists()}
    assert len(second.best_k_models) == 2

    exported = tmp_path / "exported.ckpt"
    torch.save(content(root / "ckpts" / Path(second.last_model_path).name), exported)
    longest: Case = ([arguments], {"max_epochs": 4}, {})
    trainer, (third,), _ = train(namespace, root, longest, own=False, ckpt_path=str(exported))
    assert trainer.current_epoch == 4
    assert third.last_model_path == second.last_model_path
