"""The older library's plugins: every argument takes effect, or is refused or said with a sentence."""

from __future__ import annotations

import importlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency import faultpoints
from resiliency.compat import checkpoint_io
from resiliency.errors import ConfigError
from resiliency.inspection.by_path import locate
from resiliency.plugins import _lightning
from resiliency.plugins.checkpoint_io import TieredIO
from resiliency.storage.manifest import META_DIR
from tests.plugins.test_checkpoint_io import NAMESPACES, Batches, checkpoint, make_model, make_trainer

KINDS = {
    "MinCkptOverheadCheckpointIO": "min_ckpt_overhead",
    "InClusterLocalCheckpointIO": "in_cluster_local_ckpt",
    "CombinedCheckpointIO": "combined_functionality",
}
TIERED = [name for name in KINDS if name != "MinCkptOverheadCheckpointIO"]


def build(name: str, namespace: str = "lightning.pytorch") -> Any:
    module = KINDS.get(name, "persistent_ckpt_proc")
    return importlib.import_module(f"resiliency.plugins.{module}").build(namespace)


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes plugins that are torn down."""
    plugins: list[Any] = []

    def make(name: str, *arguments: Any, **settings: Any) -> Any:
        plugins.append(build(name)(*arguments, **settings))
        return plugins[-1]

    yield make
    for plugin in plugins:
        plugin.teardown()


def fit(plugin: Any, namespace: str, folder: Path, *, steps: int, ckpt: Path | None = None) -> Any:
    trainer = make_trainer(namespace, folder, plugin, steps=steps)
    trainer.fit(make_model(namespace), Batches(), ckpt_path=None if ckpt is None else str(ckpt))
    return trainer


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", KINDS)
def test_a_fit_saves_and_resumes(name: str, namespace: str, tmp_path: Path) -> None:
    plugin = build(name, namespace)("torch_dist")
    assert isinstance(plugin, importlib.import_module(f"{namespace}.plugins.io").CheckpointIO)
    assert isinstance(plugin, TieredIO) and type(plugin).__name__ == name
    trainer = fit(plugin, namespace, tmp_path, steps=3)
    assert _lightning.other_writer(trainer, has_adapter=True) is None
    path = tmp_path / "ck" / "step=3.ckpt"
    located = locate(str(path))
    assert located is not None and located.is_checked
    again = fit(build(name, namespace)("torch_dist"), namespace, tmp_path, steps=4, ckpt=path)
    assert again.global_step == 4


@pytest.mark.parametrize("name", KINDS)
def test_arguments_are_taken_by_place(name: str, made: Any) -> None:
    made(name, "torch_dist", True, None, False, 2, True)
    with pytest.raises(TypeError):
        build(name)(unknown=1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ({"save_ckpt_format": "zarr"}, "pass 'torch_dist'"),
        ({"load_strictness": "raise_all"}, "strict_loading"),
        ({"torch_dist_multiproc": 0}, "1 or more"),
        ({"torch_dist_multiproc": "2"}, "1 or more"),
    ],
)
def test_what_cannot_be_done_is_refused(name: str, wrong: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        build(name)(**wrong)


def test_an_address_is_no_local_folder() -> None:
    with pytest.raises(ConfigError, match="address"):
        build("CombinedCheckpointIO")(local_ckpt_dir="gs://bucket")


@pytest.mark.parametrize("name", KINDS)
def test_load_directly_on_device(name: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_io, "_device", lambda: torch.device("meta"))  # as the GPU of a host that has one
    path = tmp_path / "step=1.ckpt"
    made(name).save_checkpoint(checkpoint(1), path)
    assert made(name).load_checkpoint(path)["state_dict"]["w"].device.type == "meta"
    assert made(name).load_checkpoint(path, map_location="cpu")["state_dict"]["w"].device.type == "cpu"
    assert made(name, load_directly_on_device=False).load_checkpoint(path)["state_dict"]["w"].device.type == "cpu"


PARALLEL = [
    *(("MinCkptOverheadCheckpointIO", flag) for flag in ("parallel_save", "parallel_save_within_dp", "parallel_load")),
    *(
        (name, f"{tier}_parallel_{what}")
        for name in TIERED
        for tier in ("persistent", "local")
        for what in ("save", "save_within_dp", "load")
    ),
    *((name, "use_ckpt_load_replication") for name in TIERED),
]


@pytest.mark.parametrize(("name", "flag"), PARALLEL)
def test_what_ranks_would_share_out_is_said(name: str, flag: str, made: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, checkpoint_io.__name__):
        made(name)
        assert caplog.records == []
        made(name, **{flag: True})
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name}: {flag}:") and "ModelCheckpoint" in record.getMessage()


# -- saves in the background --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_async_save_returns_before_it_is_finished(name: str, made: Any, tmp_path: Path) -> None:
    plugin, path = made(name, async_save=True), tmp_path / "step=1.ckpt"
    done: list[bool] = []
    state = checkpoint(1, 5.0)
    plugin.save_checkpoint(state, path, storage_options={"finalize_fn": lambda: done.append(path.exists())})
    assert done == []
    state["state_dict"]["w"].zero_()  # it was copied
    assert plugin.load_checkpoint(path)["state_dict"]["w"][0, 0] == 5.0
    assert done == [True]


def test_a_save_after_the_fit_is_finished_when_it_returns(made: Any, tmp_path: Path) -> None:
    """No other call may follow that would finish it."""
    plugin, path = made("MinCkptOverheadCheckpointIO", async_save=True), tmp_path / "step=1.ckpt"
    plugin.teardown()
    done: list[bool] = []
    plugin.save_checkpoint(checkpoint(1), path, storage_options={"finalize_fn": lambda: done.append(path.exists())})
    assert done == [True]


def test_without_async_save_it_is_there(made: Any, tmp_path: Path) -> None:
    done: list[bool] = []
    path = tmp_path / "step=1.ckpt"
    made("CombinedCheckpointIO").save_checkpoint(
        checkpoint(1), path, storage_options={"finalize_fn": lambda: done.append(path.exists())}
    )
    assert done == [True] and path.exists()


def test_a_removal_waits_for_the_save_that_replaces_it(made: Any, tmp_path: Path) -> None:
    plugin = made("MinCkptOverheadCheckpointIO", async_save=True)
    old, new = tmp_path / "step=1.ckpt", tmp_path / "step=2.ckpt"
    plugin.save_checkpoint(checkpoint(1), old)
    plugin.load_checkpoint(old)
    plugin.save_checkpoint(checkpoint(2), new)
    plugin.remove_checkpoint(old)
    assert old.exists()
    plugin.teardown()
    assert new.exists() and not old.exists()


def test_a_finalize_fn_that_raises_leaves_nothing_undone(made: Any, tmp_path: Path) -> None:
    plugin = made("MinCkptOverheadCheckpointIO", async_save=True)
    saved: list[tuple[Path, Path]] = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        old, new = folder / "step=1.ckpt", folder / "step=2.ckpt"
        plugin.save_checkpoint(checkpoint(1), old)
        plugin.load_checkpoint(old)
        plugin.save_checkpoint(checkpoint(2), new, storage_options={"finalize_fn": lambda: 1 / 0})
        plugin.remove_checkpoint(old)
        saved.append((old, new))
    with pytest.raises(ZeroDivisionError):
        plugin.teardown()
    assert all(new.exists() and not old.exists() for old, new in saved)
    assert not (tmp_path / "a" / META_DIR).exists(), "the engine was not closed"


def test_a_save_that_fails_in_the_background_keeps_the_old_one(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = made("MinCkptOverheadCheckpointIO", async_save=True)
    old, new, newer = (tmp_path / f"step={step}.ckpt" for step in (1, 2, 3))
    plugin.save_checkpoint(checkpoint(1), old)
    plugin.load_checkpoint(old)

    faultpoints.arm("save.block:error@*")
    try:
        plugin.save_checkpoint(checkpoint(2), new)
        plugin.remove_checkpoint(old)
        called: list[int] = []
        plugin.load_checkpoint(old)
        plugin.save_checkpoint(checkpoint(3), newer, storage_options={"finalize_fn": lambda: called.append(3)})
        plugin.remove_checkpoint(old)
        plugin.load_checkpoint(old)
    finally:
        faultpoints.arm("")
    assert called == [], "a save that failed was called finished"
    assert old.exists() and not new.exists() and "step=2.ckpt was not saved" in caplog.text
    plugin.save_checkpoint(checkpoint(4), tmp_path / "step=4.ckpt")
    plugin.teardown()
    assert not old.exists() and (tmp_path / "step=4.ckpt").exists()


def test_a_plugin_can_be_pickled_while_it_saves(made: Any, tmp_path: Path) -> None:
    plugin = made("CombinedCheckpointIO", async_save=True, local_ckpt_dir=tmp_path)
    plugin.save_checkpoint(checkpoint(1), tmp_path / "step=1.ckpt")
    twin = pickle.loads(pickle.dumps(plugin))
    assert type(twin) is type(plugin) and twin._arguments == plugin._arguments
    twin.teardown()


# -- tiers --------------------------------------------------------------------------------------------------------------


def durable(plugin: Any, folder: Path) -> bool:
    return bool(plugin._engines.take(str(folder), plugin._run, plugin._options).engine._local.durable)


@pytest.mark.parametrize("name", TIERED)
def test_local_ckpt_dir_says_which_saves_are_in_the_local_tier(name: str, made: Any, tmp_path: Path) -> None:
    for folder in ("local/job", "persistent", "local-not"):
        (tmp_path / folder).mkdir(parents=True)
        plugin = made(name, local_ckpt_dir=str(tmp_path / "local"))
        plugin.save_checkpoint(checkpoint(1), tmp_path / folder / "step=1.ckpt")
        assert durable(plugin, tmp_path / folder) is (folder != "local/job")


@pytest.mark.parametrize("persistent", [True, False])
def test_a_save_may_say_which_tier_it_is_for(persistent: bool, made: Any, tmp_path: Path) -> None:
    plugin = made("InClusterLocalCheckpointIO", local_ckpt_dir=tmp_path if persistent else None)
    told = {"is_persistent_storage": persistent, "content_metadata": {}}
    plugin.save_checkpoint(checkpoint(1), tmp_path / "step=1.ckpt", storage_options=told)
    assert durable(plugin, tmp_path) is persistent
    assert told == {"is_persistent_storage": persistent, "content_metadata": {}}


@pytest.mark.parametrize("wrong", [{"persistent": True}, "local"])
def test_other_storage_options_are_refused(wrong: Any, made: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is_persistent_storage"):
        made("CombinedCheckpointIO").save_checkpoint(checkpoint(1), tmp_path / "a.ckpt", storage_options=wrong)


# -- the wrapper --------------------------------------------------------------------------------------------------------


def test_persistent_process_refuses_plugins_of_others() -> None:
    io = importlib.import_module("lightning.pytorch.plugins.io").TorchCheckpointIO()
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        build("PersistentCheckpointProcessIO")(io)


def test_profile_dir_is_said_to_have_no_effect(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    made("PersistentCheckpointProcessIO", made("CombinedCheckpointIO"))
    assert caplog.records == []
    made("PersistentCheckpointProcessIO", made("CombinedCheckpointIO"), profile_dir="/traces")
    assert "ProfileCheckpointCallback" in caplog.text and "/traces" in caplog.text
