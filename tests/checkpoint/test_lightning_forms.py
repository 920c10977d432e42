"""A Lightning checkpoint in the form of its distributed folder, and back."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from resiliency.checkpoint.lightning_forms import META, dumped_form, plain_name, sharded_form, with_names
from resiliency.errors import ConfigError


def named(*names: str) -> dict[str, Any]:
    """The state of an optimizer whose parameters have these names; the last one has no state yet."""
    state = {name: {"step": torch.tensor(3.0)} for name in names[:-1]}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(names)}]}


def test_the_model_and_the_optimizers_stand_beside_everything_else() -> None:
    dumped = {"state_dict": {"a": torch.ones(2)}, "optimizer_states": [named("a", "b"), named("c")], "global_step": 3}
    stored = sharded_form({**dumped, "lr_schedulers": []}, keeps_meta=True)
    assert set(stored) == {"state_dict", "optimizer_0", "optimizer_1", META}
    assert stored["optimizer_0"]["param_groups"][0]["params"] == ["a", "b"]
    back = dumped_form(stored, allow_pickle=False)
    assert back["global_step"] == 3 and back["state_dict"] is stored["state_dict"]
    first, second = back["optimizer_states"]
    assert list(first["state"]) == [0] and first["param_groups"][0]["params"] == [0, 1]
    assert second["state"] == {} and second["param_groups"][0]["params"] == [0]
    assert dumped_form(dumped, allow_pickle=False) is dumped, "as it was dumped"


def test_weights_alone_have_no_optimizers() -> None:
    stored = sharded_form({"state_dict": {}, "epoch": 1}, keeps_meta=True)
    assert dumped_form(stored, allow_pickle=False) == {"state_dict": {}, "epoch": 1}


def test_the_folder_of_fsdp_has_the_weights_under_another_key() -> None:
    meta = {"pytorch-lightning_version": "2.6.6", "lr_schedulers": [], "epoch": 1}
    empty = {"param_groups": [{"lr": 0.1, "params": ["a"]}]}  # of SGD, as it comes from a folder
    back = dumped_form({"model": {"a": 1}, "optimizer_0": empty, META: meta}, allow_pickle=False)
    assert back["state_dict"] == {"a": 1} and back["epoch"] == 1
    assert back["optimizer_states"] == [{"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}]


def test_the_folder_of_fabric_is_what_its_user_has_saved() -> None:
    saved = {"model": {"a": 1}, "sgd": {}}
    assert dumped_form({**saved, META: {"step": 3}}, allow_pickle=False) == {**saved, "step": 3}


class Custom:
    pass


def test_objects_of_any_class_are_loaded_only_when_that_is_allowed() -> None:
    stored = sharded_form({"state_dict": {}, "own": Custom()}, keeps_meta=True)
    with pytest.raises(pickle.UnpicklingError):
        dumped_form(stored, allow_pickle=False)
    assert isinstance(dumped_form(stored, allow_pickle=True)["own"], Custom)


def test_other_ranks_check_the_rest_and_store_nothing_of_it() -> None:
    assert sharded_form({"state_dict": {}, "epoch": 1}, keeps_meta=False)[META] == b""
    with pytest.raises((AttributeError, pickle.PicklingError)):
        sharded_form({"state_dict": {}, "own": lambda: 0}, keeps_meta=False)


class Part:
    """Looks like a DTensor."""

    device_mesh = placements = None


def test_a_part_of_a_tensor_elsewhere_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match="'callbacks/ema/weight', a Part of which each rank has a part"):
        sharded_form({"state_dict": {}, "callbacks": {"ema": {"weight": Part()}}}, keeps_meta=True)


def test_names_do_not_depend_on_wrappers() -> None:
    assert plain_name("net._orig_mod.0._checkpoint_wrapped_module.weight") == "net.0.weight"
    assert plain_name("_orig_mod_of_mine.weight") == "_orig_mod_of_mine.weight"
    saved = {"net.0.weight": 1, "other": 2}
    assert with_names(saved, ["net._orig_mod.0.weight"]) == {"net._orig_mod.0.weight": 1, "other": 2}
