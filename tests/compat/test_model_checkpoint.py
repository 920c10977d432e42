"""The older library's arguments of ModelCheckpoint: each does what it says, and None is what the stock class does."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.callbacks.checkpointing import places as rules_of_places
from resiliency.callbacks.model_checkpoint import build
from resiliency.compat.model_checkpoint import NO_OPTIMIZER
from resiliency.compat.training_notes import context_folder, note_start
from resiliency.storage.manifest import META_DIR
from tests.callbacks.harness import (
    EMBEDDED,
    NAMESPACES,
    content,
    loader,
    make_net,
    make_trainer,
    names,
    ours,
    stock,
)

OLDER = (
    "save_optim_on_train_end",
    "save_optim_on_train_ends",
    "always_save_context",
    "save_context_on_train_end",
    "preprocess_files",
    "use_in_cluster_local_ckpts",
    "is_persistent_storage",
    "enable_high_scale_ckpt",
    "delete_unfinished_ckpt_on_start",
    "priority",
)


@pytest.fixture(params=NAMESPACES)
def namespace(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fit(namespace: str, root: Path, *callbacks: Any, ckpt: Path | None = None, **settings: Any) -> Any:
    trainer = make_trainer(namespace, callbacks, root=root, **({"max_steps": 6, "max_epochs": -1} | settings))
    trainer.fit(make_net(namespace), loader(), ckpt_path=None if ckpt is None else str(ckpt))
    return trainer


def everything(root: Path) -> set[str]:
    """Paths of all files but the engine's own."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and META_DIR not in path.parts}


def test_none_of_all_is_the_stock_class(namespace: str, tmp_path: Path) -> None:
    results = []
    for own in (False, True):
        root = tmp_path / "run"
        kind = build if own else stock
        given = {**dict.fromkeys(OLDER), "options": EMBEDDED} if own else {}
        (root / "ck").mkdir(parents=True)
        (root / "ck" / "step=1-unfinished").touch()
        fit(namespace, root, kind(namespace)(dirpath=root / "ck", every_n_train_steps=2, **given))
        results.append((everything(root), list(content(root / "ck" / "epoch=0-step=6.ckpt")["optimizer_states"][0])))
        root.rename(tmp_path / f"own-{own}")
    assert results[0] == results[1]
    assert "ck/step=1-unfinished" in results[0][0]


# -- save_optim_on_train_end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["save_optim_on_train_end", "save_optim_on_train_ends"])
@pytest.mark.parametrize("limit", [{"max_steps": 6}, {"max_steps": -1, "max_epochs": 1}])
def test_false_drops_the_optimizer_at_the_end_alone(argument: str, limit: dict[str, int], tmp_path: Path) -> None:
    callback = ours(
        NAMESPACES[0], tmp_path, every_n_train_steps=3, filename="{step}", save_top_k=-1, **{argument: False}
    )
    fit(NAMESPACES[0], tmp_path, callback, **limit)
    middle, end = content(tmp_path / "step=3.ckpt"), content(tmp_path / "step=6.ckpt")
    assert middle["optimizer_states"] and NO_OPTIMIZER not in middle
    assert end["optimizer_states"] == [] and end[NO_OPTIMIZER] is True
    assert end["state_dict"].keys() == middle["state_dict"].keys()


@pytest.mark.parametrize("value", [True, None])
def test_otherwise_the_optimizer_is_kept(value: bool | None, tmp_path: Path) -> None:
    callback = ours(NAMESPACES[0], tmp_path, every_n_train_steps=6, filename="{step}", save_optim_on_train_end=value)
    fit(NAMESPACES[0], tmp_path, callback)
    assert content(tmp_path / "step=6.ckpt")["optimizer_states"]


def test_a_job_that_is_stopped_before_its_end_keeps_the_optimizer(tmp_path: Path) -> None:
    class Stops(importlib.import_module(f"{NAMESPACES[0]}.callbacks").Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.should_stop = trainer.global_step == 4

    callback = ours(NAMESPACES[0], tmp_path, every_n_train_steps=4, filename="{step}", save_optim_on_train_end=False)
    fit(NAMESPACES[0], tmp_path, Stops(), callback)
    assert content(tmp_path / "step=4.ckpt")["optimizer_states"]


def test_a_resume_without_the_optimizer_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def callback() -> Any:
        return ours(NAMESPACES[0], tmp_path, every_n_train_steps=3, filename="{step}", save_optim_on_train_end=False)

    fit(NAMESPACES[0], tmp_path, callback())
    assert "without optimizer state" not in caplog.text
    trainer = fit(NAMESPACES[0], tmp_path, callback(), max_steps=9, ckpt=tmp_path / "step=6.ckpt")
    assert trainer.global_step == 9
    assert "step 6 was saved without optimizer state" in caplog.text


def test_a_finished_job_that_is_started_again_has_nothing_to_do(tmp_path: Path) -> None:
    for _ in range(2):
        callback = ours(NAMESPACES[0], tmp_path, every_n_train_steps=3, save_optim_on_train_end=False, auto_resume=True)
        trainer = fit(NAMESPACES[0], tmp_path, callback)
        assert trainer.global_step == 6


# -- contexts -----------------------------------------------------------------------------------------------------------


def test_a_context_beside_every_checkpoint_goes_with_it(namespace: str, tmp_path: Path) -> None:
    callback = ours(namespace, tmp_path, every_n_train_steps=2, filename="{step}", always_save_context=True)
    fit(namespace, tmp_path, callback)
    assert sorted(path.name for path in tmp_path.glob("*-context")) == ["step=6-context"]
    found = json.loads((tmp_path / "step=6-context" / "context.json").read_text())
    assert found["global_step"] == 6 and found["trainer"]["max_steps"] == 6
    assert found["module"].endswith("Net") and found["command"] == sys.argv
    assert found["versions"]["torch"] == torch.__version__
    assert "BatchNorm1d" in (tmp_path / "step=6-context" / "model.txt").read_text()


def test_a_context_for_each_that_is_kept(tmp_path: Path) -> None:
    callback = ours(
        NAMESPACES[0], tmp_path, every_n_train_steps=2, filename="{step}", save_top_k=-1, always_save_context=True
    )
    fit(NAMESPACES[0], tmp_path, callback)
    assert sorted(path.name for path in tmp_path.glob("*-context")) == [f"step={n}-context" for n in (2, 4, 6)]


def test_a_context_at_the_end_alone(tmp_path: Path) -> None:
    callback = ours(
        NAMESPACES[0], tmp_path, every_n_train_steps=2, filename="{step}", save_top_k=-1, save_context_on_train_end=True
    )
    fit(NAMESPACES[0], tmp_path, callback)
    assert [path.name for path in tmp_path.glob("*-context")] == ["step=6-context"]


def test_a_context_that_cannot_be_written_is_said_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context_folder(str(tmp_path / "step=6.ckpt")).write_text("in the way")
    callback = ours(NAMESPACES[0], tmp_path, every_n_train_steps=6, filename="{step}", always_save_context=True)
    assert fit(NAMESPACES[0], tmp_path, callback).global_step == 6
    assert "training goes on" in caplog.text and names(tmp_path) == {"step=6.ckpt"}


# -- preprocess_files ---------------------------------------------------------------------------------------------------


def test_how_a_run_was_started_is_noted_and_earlier_notes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "code"
    repository.mkdir()
    for command in (
        ["init", "-q"],
        ["-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-mx"],
    ):
        subprocess.run(["git", *command], cwd=repository, check=True, timeout=30)
    root = tmp_path / "run"
    for number in range(3):
        monkeypatch.setattr(sys, "argv", [str(repository / "train.py"), f"--start={number}"])
        callback = ours(NAMESPACES[0], root / "ck", every_n_train_steps=6, preprocess_files=True, save_top_k=-1)
        fit(NAMESPACES[0], root, callback)
    found = [(root / name / "cmd-args.log").read_text() for name in ("run_0", "run_1", ".")]
    assert [text.split()[-1] for text in found] == ["--start=0", "--start=1", "--start=2"]
    assert (root / "git-info.log").read_text().startswith("commit hash: ")
    assert len(list((root / "ck").glob("*.ckpt"))) >= 1, "checkpoints were moved"


def test_no_notes_without_it_nor_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(NAMESPACES[0], tmp_path, ours(NAMESPACES[0], tmp_path / "ck", preprocess_files=False))
    assert not (tmp_path / "cmd-args.log").exists()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    note_start(str(tmp_path))
    assert (tmp_path / "cmd-args.log").exists() and not (tmp_path / "git-info.log").exists()


# -- tiers --------------------------------------------------------------------------------------------------------------


def places(tmp_path: Path, **arguments: Any) -> Any:
    return ours(NAMESPACES[0], tmp_path / "ck", **arguments)._places(tmp_path / "ck")


def test_the_local_tier_is_in_the_older_librarys_folder_or_on_the_ramdisk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(rules_of_places, "IN_CLUSTER", str(tmp_path / "local"))
    found = places(tmp_path, use_in_cluster_local_ckpts=True, run="job")
    assert found.local.directory == str(tmp_path / "local" / "job" / "checkpoint")
    assert [remote.address for remote in found.remotes] == [str(tmp_path / "ck")]
    monkeypatch.setattr(rules_of_places, "IN_CLUSTER", str(tmp_path / "missing"))
    found = places(tmp_path, use_in_cluster_local_ckpts=True, run="job")
    assert found.local.directory.startswith(f"/dev/shm/resiliency-{os.getuid()}/") and not found.local.durable
    given = places(tmp_path, use_in_cluster_local_ckpts=True, local_dir=tmp_path / "mine")
    assert given.local.directory == str(tmp_path / "mine")


@pytest.mark.parametrize("value", [None, False])
def test_no_local_tier_unless_asked_for(value: bool | None, tmp_path: Path) -> None:
    found = places(tmp_path, use_in_cluster_local_ckpts=value, is_persistent_storage=False)
    assert (found.local.directory, found.remotes, found.local.durable) == (str(tmp_path / "ck"), (), True)


def test_is_persistent_storage_says_which_tier_dirpath_is(tmp_path: Path) -> None:
    local = places(tmp_path, use_in_cluster_local_ckpts=True, is_persistent_storage=False)
    assert (local.local.directory, local.remotes, local.local.durable) == (str(tmp_path / "ck"), (), False)
    persistent = places(tmp_path, use_in_cluster_local_ckpts=True, is_persistent_storage=True)
    assert (persistent.local.directory, persistent.remotes, persistent.local.durable) == (
        str(tmp_path / "ck"),
        (),
        True,
    )


def test_contradictions_are_refused(tmp_path: Path) -> None:
    both = {"use_in_cluster_local_ckpts": True, "is_persistent_storage": False}
    with pytest.raises(ValueError, match="pass one of them"):
        places(tmp_path, local_dir=tmp_path / "x", **both)
    with pytest.raises(ValueError, match="is an address"):
        ours(NAMESPACES[0], "gs://bucket/x", **both)._places("gs://bucket/x")


def test_a_fit_with_a_local_tier_leaves_the_checkpoint_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(rules_of_places, "IN_CLUSTER", str(tmp_path / "local"))
    callback = ours(
        NAMESPACES[0], tmp_path / "ck", every_n_train_steps=3, filename="{step}", use_in_cluster_local_ckpts=True
    )
    fit(NAMESPACES[0], tmp_path, callback)
    assert names(tmp_path / "ck") == {"step=6.ckpt"}
    assert list((tmp_path / "local" / "default" / "checkpoint").rglob("shard-*"))


# -- priority -----------------------------------------------------------------------------------------------------------


def pair(namespace: str, root: Path, high: int | None, low: int | None) -> list[Any]:
    common: dict[str, Any] = {"filename": "{step}", "save_top_k": -1}
    return [
        ours(namespace, root / "low", every_n_train_steps=2, priority=low, **common),
        ours(namespace, root / "high", every_n_train_steps=4, priority=high, monitor="step", mode="max", **common),
    ]


@pytest.mark.parametrize(("high", "low"), [(1, 0), (0, -1), (1, None)])
def test_the_higher_priority_saves_a_step_that_both_want(
    high: int, low: int | None, namespace: str, tmp_path: Path
) -> None:
    trainer = fit(namespace, tmp_path, *pair(namespace, tmp_path, high, low), max_steps=8)
    assert names(tmp_path / "high") == {"step=4.ckpt", "step=8.ckpt"}
    assert names(tmp_path / "low") == {"step=2.ckpt", "step=6.ckpt"}
    assert trainer.checkpoint_callback.priority == high


def test_of_equal_priority_both_save(namespace: str, tmp_path: Path) -> None:
    fit(namespace, tmp_path, *pair(namespace, tmp_path, None, 0), max_steps=8)
    assert names(tmp_path / "high") == {"step=4.ckpt", "step=8.ckpt"}
    assert names(tmp_path / "low") == {f"step={step}.ckpt" for step in (2, 4, 6, 8)}


# -- unfinished checkpoints ---------------------------------------------------------------------------------------------


def marked(folder: Path) -> None:
    folder.mkdir()
    (folder / "step=9").mkdir()
    (folder / "step=9" / "x").touch()
    (folder / "step=8.ckpt").write_text("torn")
    (folder / "step=7.ckpt").write_text("whole")
    for name in ("step=9", "step=8"):
        (folder / f"{name}-unfinished").touch()


@pytest.mark.parametrize("value", [True, False, None])
def test_marked_checkpoints_are_deleted_when_asked_for(value: bool | None, tmp_path: Path) -> None:
    marked(tmp_path / "ck")
    callback = ours(
        NAMESPACES[0],
        tmp_path / "ck",
        every_n_train_steps=6,
        filename="{step}",
        delete_unfinished_ckpt_on_start=value,
    )
    fit(NAMESPACES[0], tmp_path, callback)
    left = {path.name for path in (tmp_path / "ck").iterdir() if not path.name.startswith(".")}
    kept = {"step=9", "step=8.ckpt", "step=9-unfinished", "step=8-unfinished"}
    assert left == {"step=7.ckpt", "step=6.ckpt"} | (set() if value else kept)


def test_a_checkpoint_of_ours_is_never_deleted_for_a_marker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(NAMESPACES[0], tmp_path, ours(NAMESPACES[0], tmp_path, every_n_train_steps=6, filename="{step}"))
    kind = build(NAMESPACES[0])
    kind.set_checkpoint_unfinished_marker(tmp_path / "step=6.ckpt")
    with caplog.at_level(logging.WARNING):
        kind._remove_unfinished_checkpoints(tmp_path, True)
    assert content(tmp_path / "step=6.ckpt")["global_step"] == 6
    assert "is kept" in caplog.text


def test_markers(namespace: str, tmp_path: Path) -> None:
    kind = build(namespace)
    path = tmp_path / "new" / "step=5.ckpt"
    for name in ("step=5.ckpt", "step=5", "step=5-EMA.ckpt"):
        assert kind.format_checkpoint_unfinished_marker_path(path.with_name(name)) == path.with_name(
            "step=5-unfinished"
        )
    assert kind.UNFINISHED_CHECKPOINT_SUFFIX == "-unfinished"
    kind.set_checkpoint_unfinished_marker(path, barrier_after=False, is_checkpoint_file_handler=False)
    assert not kind.is_checkpoint_unfinished(path)
    kind.set_checkpoint_unfinished_marker(path, barrier_after=True)
    assert kind.is_checkpoint_unfinished(path)
    kind.remove_checkpoint_unfinished_marker(path, is_checkpoint_file_handler=False)
    assert kind.is_checkpoint_unfinished(path)
    kind.remove_checkpoint_unfinished_marker(path, barrier_before=True)
    kind.remove_checkpoint_unfinished_marker(path)
    assert not kind.is_checkpoint_unfinished(path)


def test_barriers_come_after_setting_and_before_removing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resiliency.compat import markers

    kind, path = build(NAMESPACES[0]), tmp_path / "step=5.ckpt"
    seen: list[bool] = []
    monkeypatch.setattr(markers.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(markers.dist, "barrier", lambda: seen.append(kind.is_checkpoint_unfinished(path)))
    kind.set_checkpoint_unfinished_marker(path)
    assert seen == []
    kind.set_checkpoint_unfinished_marker(path, barrier_after=True)
    kind.remove_checkpoint_unfinished_marker(path, barrier_before=True)
    assert seen == [True, True] and not kind.is_checkpoint_unfinished(path)
    kind.set_checkpoint_unfinished_marker(path)
    monkeypatch.setattr(markers.dist, "barrier", lambda: (_ for _ in ()).throw(RuntimeError("a rank is missing")))
    with pytest.raises(RuntimeError):
        kind.remove_checkpoint_unfinished_marker(path, barrier_before=True)
    assert kind.is_checkpoint_unfinished(path)
