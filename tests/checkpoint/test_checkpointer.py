"""The facade: what it refuses and how it says so, what a save keeps, and what a load gives back."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from resiliency import faultpoints
from resiliency.agent import core, file_pool
from resiliency.checkpoint import (
    Checkpointer,
    CheckpointerOptions,
    Restored,
    Ticket,
    arena,
    session,
    shard_access,
    snapshot,
)
from resiliency.checkpoint import arena as arena_module
from resiliency.checkpoint.arena import Arena
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.save_tracker import SaveTracker
from resiliency.errors import AgentError, ConfigError, NoCheckpointFound, ResiliencyError, Timeout
from resiliency.inspection.by_path import load_path, locate
from resiliency.settings import environment
from resiliency.storage import known_files
from resiliency.storage.interval import Interval
from resiliency.storage.manifest import FILES_DIR
from resiliency.storage.shard_file import IDENTITY_BYTES, read_identity
from resiliency.storage.stage import Stage
from resiliency.storage.stock import is_stock
from resiliency.testing.checkpoints import QUICK, RUN, differences, make_checkpointer, make_state, run_ranks, step_dirs
from tests.embedded import host_agent

SOON = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faultpoints.arm("")


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with make_checkpointer(tmp_path / "c") as made:
        yield made


def save(checkpointer: Checkpointer, step: int, state: Any = None, **further: Any) -> Ticket:
    ticket = checkpointer.save(step, make_state(step) if state is None else state, **further)
    assert ticket is not None
    ticket.wait(Stage.DURABLE, timeout=SOON)
    return ticket


def load(checkpointer: Checkpointer, **arguments: Any) -> Restored:
    restored = checkpointer.load(**arguments)
    assert restored is not None
    return restored


# ---- wrong arguments: ValueError or TypeError, saying what to pass instead


@pytest.mark.parametrize(
    ("step", "error", "word"),
    [
        (-1, ValueError, "0 or more"),
        (1.0, TypeError, "int"),
        ("5", TypeError, "int"),
        (None, TypeError, "int"),
        (True, TypeError, "int"),
        (torch.tensor(3), TypeError, "int"),
    ],
)
def test_a_wrong_step_is_refused(checkpointer: Checkpointer, step: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        checkpointer.save(step, {})
    assert checkpointer.load() is None


@pytest.mark.parametrize("which", ["names", "supersedes"])
@pytest.mark.parametrize(
    "names",
    [
        "last",
        "step=1.ckpt",
        Path("a.ckpt"),
        [Path("a.ckpt")],
        [1],
        [""],
        ["/a"],
        ["../a"],
        ["a/../b"],
        [".hidden"],
        ["a//b"],
        ["a/"],
        ["a\nb"],
        ["a\0"],
        ["a/./b"],
    ],
    ids=repr,
)
def test_wrong_names_are_refused_and_the_next_save_works(checkpointer: Checkpointer, names: Any, which: str) -> None:
    with pytest.raises((ValueError, TypeError), match="name"):
        checkpointer.save(1, {}, **{which: names})
    save(checkpointer, 2)


@pytest.mark.parametrize("names", [([["a.ckpt"]]), ([1]), ([Path("a")]), ([None]), ([""])], ids=repr)
def test_a_deletion_of_a_wrong_name_is_refused(checkpointer: Checkpointer, names: Any) -> None:
    save(checkpointer, 1)
    with pytest.raises((ValueError, TypeError), match="name"):
        checkpointer.delete(*names)
    save(checkpointer, 2)
    assert checkpointer.flush(timeout=SOON)


@pytest.mark.parametrize(
    "info",
    [{"a": object()}, {"a": torch.tensor(1)}, {"a": {1, 2}}, 3, [1]],
    ids=["object", "tensor", "set", "number", "list"],
)
def test_info_that_is_not_json_is_refused(checkpointer: Checkpointer, info: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="info"):
        checkpointer.save(1, {}, info=info)
    save(checkpointer, 2)


@pytest.mark.parametrize(
    "state",
    [{"f": lambda: 0}, {"lock": threading.Lock()}],
    ids=["function", "lock"],
)
@pytest.mark.parametrize("where", ["state", "per_rank"])
def test_states_that_cannot_be_stored(checkpointer: Checkpointer, state: Any, where: str) -> None:
    arguments = {"state": {}, where: {"deep": [state]}}
    with pytest.raises(ConfigError) as caught:
        checkpointer.save(1, **arguments)
    assert "deep/0/" in str(caught.value)
    save(checkpointer, 2)
    assert load(checkpointer).step == 2


@pytest.mark.parametrize("step", [5, "5", (5, 1, "x")])
def test_loading_a_step_by_something_else_than_its_identity(checkpointer: Checkpointer, step: Any) -> None:
    save(checkpointer, 5)
    with pytest.raises(TypeError, match="StepId"):
        checkpointer.load(step=step)


@pytest.mark.parametrize("stage", ["committed", "", "uploaded", None, True])
def test_a_stage_that_is_none_is_refused(checkpointer: Checkpointer, stage: Any) -> None:
    ticket = save(checkpointer, 1)
    with pytest.raises(TypeError, match="Stage.COMMITTED"):
        ticket.wait(stage)
    with pytest.raises(TypeError, match="Stage.COMMITTED"):
        checkpointer.flush(stage)


@pytest.mark.parametrize(
    ("values", "error", "word"),
    [
        ({"directory": 5}, TypeError, "path"),
        ({"directory": ""}, ValueError, "path"),
        ({"directory": "gs://bucket/job"}, ValueError, "remotes"),
        ({"run": "a/b"}, ValueError, "folder name"),
        ({"run": ".."}, ValueError, "folder name"),
        ({"rank": 2, "world_size": 2}, ValueError, "world_size"),
        ({"rank": -1, "world_size": 2}, ValueError, "world_size"),
        ({"remotes": [RemoteTierOptions(address="/x"), RemoteTierOptions(address="/y")]}, ValueError, "same name"),
        ({"remotes": "gs://bucket"}, (TypeError, ValueError), "RemoteTierOptions"),
        ({"remotes": ["gs://bucket"]}, (TypeError, ValueError), "RemoteTierOptions"),
        ({"remotes": RemoteTierOptions(address="/x")}, (TypeError, ValueError), "RemoteTierOptions"),
        ({"options": {"agent": "embedded"}}, (TypeError, ValueError), "CheckpointerOptions"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    tmp_path: Path, values: dict[str, Any], error: Any, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=word):
        Checkpointer(**{"directory": str(tmp_path / "c"), "run": RUN, "rank": 0, "world_size": 1, **values})
    assert list(tmp_path.iterdir()) == [], "a folder was made before the arguments were looked at"


def test_a_remote_tier_that_is_the_local_folder(tmp_path: Path) -> None:
    """Uploading onto itself would replace the mapped files, and the two retentions would fight."""
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for address in (str(tmp_path / "c"), f"file://{tmp_path}/c", str(tmp_path / "link")):
        with pytest.raises(ValueError, match="same folder"):
            make_checkpointer(tmp_path / "c", remotes=[RemoteTierOptions(address=address)])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"agent": "thread"}, "embedded"),
        ({"fence_timeout": 5}, "timedelta"),
        ({"previous_save_timeout": timedelta(seconds=-1)}, "zero or more"),
        ({"agree_timeout": None}, "timedelta"),
        ({"lazy_bytes": -1}, "lazy_bytes"),
        ({"lazy_bytes": "1M"}, "lazy_bytes"),
    ],
)
def test_wrong_options_are_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        CheckpointerOptions(**values)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: LocalTierOptions(directory="/x", keep=0), "1 or more"),
        (lambda: LocalTierOptions(directory="/x", keep=None, keep_named=False), "keep=1"),
        (lambda: LocalTierOptions(directory="s3://b/x"), "remotes"),
        (lambda: LocalTierOptions(directory=None), "path"),  # type: ignore[arg-type]
        (lambda: RemoteTierOptions(address=""), "gs://"),
        (lambda: RemoteTierOptions(address="/x", name="local"), "another"),
        (lambda: RemoteTierOptions(address="/x", keep=0), "1 or more"),
        (lambda: LocalTierOptions(directory="/x", keep=2.5), "keep"),  # type: ignore[arg-type]
    ],
)
def test_wrong_tiers_are_refused(make: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()


def test_a_closed_checkpointer_refuses_every_call(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    with checkpointer:
        save(checkpointer, 1)
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.open()
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.save(2, {})
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.load()
    checkpointer.close()


def test_several_ranks_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        Checkpointer(str(tmp_path), run=RUN, rank=0, world_size=2).open()


def test_a_path_object_and_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Checkpointer(pathlib.Path("~/c"), run=RUN, rank=0, world_size=1).directory == str(tmp_path / "c")


def test_a_job_may_begin_in_the_moment_in_which_another_tidies_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the other removes the folder that was there a moment before; the job had no checkpoints then."""
    real, looks = session._try_writing, []

    def removed_before(path: str) -> None:
        looks.append(path)
        if len(looks) == 1:
            shutil.rmtree(tmp_path)
        real(path)

    monkeypatch.setattr(session, "_try_writing", removed_before)
    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, make_state(1))
    assert len(looks) == 2 and os.listdir(tmp_path) != []


@pytest.mark.parametrize("agent", ["embedded", "process"])
def test_a_folder_whose_name_is_not_utf8(tmp_path: Path, agent: Any) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    for expected in (0, 1):
        with make_checkpointer(folder, options=replace(QUICK, agent=agent)) as checkpointer:
            assert len(checkpointer.steps()) == expected
            if expected:
                assert differences(load(checkpointer).state, make_state(1)) == []
            else:
                save(checkpointer, 1, names=["a.ckpt"])
    assert torch.load(folder / "a.ckpt", weights_only=True)


# ---- what comes back


def test_everything_that_was_saved_comes_back(checkpointer: Checkpointer) -> None:
    state = {
        **make_state(3),
        "odd": {"nan": float("nan"), "big": 10**300, "bytes": b"\0\xff", "set": {1, 2}, "np": np.arange(3)},
        "views": [
            torch.arange(4000.0).view(40, 100).t(),
            torch.arange(10)[::2],
            torch.tensor([1 + 2j]).conj(),
            torch.empty(0, 5),
            torch.tensor(7),
        ],
        "dtypes": {
            str(d): torch.zeros(700).to(d)
            for d in (torch.float8_e4m3fn, torch.float16, torch.uint16, torch.complex128, torch.bool)
        },
    }
    save(
        checkpointer,
        3,
        state,
        per_rank={"rng": torch.get_rng_state(), "x": (1, 2)},
        info={"loss": 0.5},
        names=["a.ckpt"],
    )
    got = load(checkpointer)
    assert (got.step, got.names, got.world_size) == (3, ("a.ckpt",), 1) and got.info["loss"] == 0.5
    assert (
        differences({k: v for k, v in got.state.items() if k != "odd"}, {k: v for k, v in state.items() if k != "odd"})
        == []
    )
    assert got.state["odd"]["bytes"] == b"\0\xff" and got.state["odd"]["nan"] != got.state["odd"]["nan"]
    assert torch.equal(got.per_rank["rng"], torch.get_rng_state()) and got.per_rank["x"] == (1, 2)


@pytest.mark.parametrize("state", [None, {}, [], 5, "text", torch.tensor(3.0), [torch.ones(5000)], {"a": {}}])
def test_states_of_any_kind_come_back(checkpointer: Checkpointer, state: Any) -> None:
    ticket = checkpointer.save(1, state)
    assert ticket is not None
    ticket.wait(timeout=SOON)
    assert differences(load(checkpointer).state, state) == []


@pytest.mark.parametrize("key", ["!objects", "__metadata__", "w@0,0", "!rank/rng", "a/b", "ü", "", "x" * 300])
def test_keys_of_any_kind_come_back_and_do_not_clash(checkpointer: Checkpointer, key: str) -> None:
    state = {
        key: torch.arange(3000.0),
        "w": torch.arange(9.0).view(3, 3),
        "rng": torch.ones(3),
        "sub": {key: torch.ones(2)},
    }
    save(checkpointer, 1, state, per_rank={"rng": torch.zeros(5), key: torch.ones(3)})
    got = load(checkpointer)
    assert (
        differences(got.state, state) == []
        and differences(got.per_rank, {"rng": torch.zeros(5), key: torch.ones(3)}) == []
    )


def test_the_state_may_change_right_after_an_eager_save(checkpointer: Checkpointer) -> None:
    for step in range(1, 6):
        state = make_state(step)
        ticket = checkpointer.save(step, state)
        assert ticket is not None
        state["model"]["weight"].fill_(-1)
        state["loops"]["history"].clear()
        ticket.wait(timeout=SOON)
        assert differences(load(checkpointer).state, make_state(step)) == []


def test_lazy_tensors_may_change_after_the_fence_and_the_rest_at_once(checkpointer: Checkpointer) -> None:
    for step in range(1, 6):
        state = make_state(step)
        weight = state["model"]["weight"]
        ticket = checkpointer.save(
            step,
            state,
            lazy=lambda tensor, weight=weight: tensor is weight,
            per_rank={"x": torch.full((4000,), step)},
        )
        assert ticket is not None
        state["optimizer"]["state"][0]["exp_avg"].fill_(-1)
        state["model"]["half"].fill_(-1)
        state["loops"]["history"].clear()
        checkpointer.fence()
        assert not checkpointer.pending
        state["model"]["weight"].fill_(-1)
        ticket.wait(timeout=SOON)
        got = load(checkpointer)
        assert differences(got.state, make_state(step)) == [] and int(got.per_rank["x"][0]) == step


def test_into_a_state_that_does_not_fit(checkpointer: Checkpointer) -> None:
    save(checkpointer, 1)
    wrong = make_state(1)
    wrong["model"]["weight"] = torch.zeros(3, 3)
    with pytest.raises(ConfigError, match="model/weight"):
        checkpointer.load(into=wrong)
    less = make_state(1)
    del less["optimizer"]
    with pytest.raises(ConfigError, match="optimizer/state/0"):
        checkpointer.load(into=less)
    more = {**make_state(1), "extra": torch.zeros(3)}
    with pytest.raises(ConfigError, match="extra"):
        checkpointer.load(into=more)
    assert differences(load(checkpointer, into=make_state(9)).state, make_state(1)) == []


def test_a_step_that_is_not_there(checkpointer: Checkpointer) -> None:
    from resiliency.storage.step_id import StepId

    assert checkpointer.load() is None
    save(checkpointer, 1)
    with pytest.raises(NoCheckpointFound, match="step 9"):
        checkpointer.load(step=StepId(9, 1, "0a0b0c"))


def test_steps_lists_what_could_be_restored(checkpointer: Checkpointer) -> None:
    assert checkpointer.steps() == []
    for step in (1, 2, 3):
        save(checkpointer, step, names=[f"{step}.ckpt"])
    assert [(step.step, names) for step, names in checkpointer.steps()] == [(n, (f"{n}.ckpt",)) for n in (3, 2, 1)]


# ---- saves one after another


def test_out_of_order_and_repeated_steps(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        for step in (10, 5, 20, 20, 0, 7):
            save(checkpointer, step)
        assert load(checkpointer).step == 20
    with make_checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 6)
        save(checkpointer, 30)
        assert load(checkpointer).step == 30


def test_a_save_that_must_not_wait_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from dataclasses import replace

    options = replace(QUICK, previous_save_timeout=timedelta(0))
    with make_checkpointer(tmp_path, options=options) as checkpointer:
        save(checkpointer, 1)
        faultpoints.arm("agent.record.write:delay=0.5")
        assert checkpointer.save(2, make_state(2)) is not None
        assert checkpointer.save(3, make_state(3)) is None
        assert checkpointer.save(4, make_state(4)) is None
        assert checkpointer.skipped == 2
        assert [outcome.step for outcome in checkpointer.poll() if outcome.failed] == [3, 4]
        assert (
            len(
                [
                    entry
                    for entry in caplog.records
                    if "no checkpoint at step" in entry.getMessage() and entry.levelname == "WARNING"
                ]
            )
            == 1
        )
        assert checkpointer.flush(timeout=SOON)
        save(checkpointer, 5)
        assert load(checkpointer).step == 5


def test_a_state_changed_before_the_fence_is_not_committed(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpointer, 1)
    real, go_on = snapshot._copy, threading.Event()
    monkeypatch.setattr(snapshot, "_copy", lambda *args: (go_on.wait(5), real(*args))[1])
    state = {"weight": torch.zeros(5000), "other": torch.zeros(5000)}
    ticket = checkpointer.save(2, state, lazy=True)
    assert ticket is not None
    state["weight"].add_(1)
    go_on.set()
    checkpointer.fence()
    with pytest.raises(ResiliencyError, match="'weight' was changed before the fence"):
        ticket.wait(timeout=SOON)
    assert "'weight' was changed before the fence" in caplog.text
    assert load(checkpointer).step == 1
    save(checkpointer, 3)
    assert load(checkpointer).step == 3


def test_python_objects_that_grow_between_saves(checkpointer: Checkpointer) -> None:
    """The layout is kept from save to save, and the room for what is no tensor with it, until that is too small."""
    for step, length in enumerate((10, 100_000, 50, 1_000_000), 1):
        save(
            checkpointer,
            step,
            {"w": torch.full((5000,), float(step)), "notes": "x" * length, "list": list(range(length // 100))},
        )
        restored = load(checkpointer)
        assert restored.state["notes"] == "x" * length and len(restored.state["list"]) == length // 100
        assert restored.state["w"][0] == step


def test_another_dtype_is_converted_and_said(checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture) -> None:
    save(checkpointer, 1, {"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int64)})
    into = {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.int64)}
    load(checkpointer, into=into)
    assert into["a"].tolist() == [0, 1, 2, 3]
    assert "'a' is stored as float32 and restored into torch.bfloat16 (0 more" in caplog.text


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        faultpoints.arm("agent.record.write:delay=0.6")
        ticket = checkpointer.save(1, make_state(1))
        assert ticket is not None
        with pytest.raises(Timeout, match="step 1"):
            ticket.wait(timeout=timedelta(seconds=0.1))
        assert checkpointer.flush(timeout=timedelta(seconds=0.1)) is False
        ticket.wait(timeout=SOON)


def test_a_state_that_grows_and_shrinks(checkpointer: Checkpointer) -> None:
    for step, rows in enumerate((10, 4000, 100, 4000, 1), start=1):
        state = {"w": torch.full((rows, 8), float(step)), "text": "x" * (rows * 10)}
        save(checkpointer, step, state)
        assert differences(load(checkpointer).state, state) == []


def test_outcomes_say_what_happened_to_each_save(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path / "c", remotes=[RemoteTierOptions(address=str(tmp_path / "r"))]) as checkpointer:
        save(checkpointer, 1, names=["a.ckpt"])
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        told = [(outcome.stage, outcome.tier, outcome.names) for outcome in checkpointer.poll()]
        assert sorted(told) == [
            ("committed", "local", ("a.ckpt",)),
            ("durable", "local", ("a.ckpt",)),
            ("durable", "object_store", ("a.ckpt",)),
        ]
        assert checkpointer.poll() == []


def test_a_tier_gets_every_nth_step_also_after_a_restart(tmp_path: Path) -> None:
    remote = RemoteTierOptions(address=str(tmp_path / "r"), interval=Interval(steps=6))
    for first in (3, 9):
        with make_checkpointer(tmp_path / "c", remotes=[remote]) as checkpointer:
            assert first == 3 or load(checkpointer).id.step == 6
            for step in range(first, first + 6, 3):
                save(checkpointer, step)
            assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
    folders = (tmp_path / "r").rglob("shard-*")
    assert {int(file.parent.name.split("-")[0]) for file in folders} == {6, 12}


def test_warming_up_makes_the_files_the_first_save_uses(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        large = {"w": torch.ones(600_000)}  # the agent prepares no small ones
        checkpointer.warm_up(large, slots=2)
        files = {path.stat().st_ino for path in tmp_path.glob(".resiliency/*/files/*.free")}
        assert len(files) == 2, "it returned before the second was there"
        save(checkpointer, 1, large)
        (folder,) = step_dirs(tmp_path).values()
        assert (folder / "shard-00000.shard").stat().st_ino in files
        checkpointer.warm_up(nbytes=100, slots=1)
        with pytest.raises(ConfigError, match="nbytes"):
            checkpointer.warm_up()


def test_warming_up_on_a_ramdisk_returns_when_the_first_save_would_not_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, mapped = threading.Event(), []
    populate, wait_mapped = Arena._populate, Arena.wait_mapped

    def late(self: Arena, file: Any) -> None:
        assert waited.wait(30)
        populate(self, file)
        mapped.append(file.slot)

    def wait(self: Arena, deadline: float) -> bool:
        waited.set()
        return wait_mapped(self, deadline)

    monkeypatch.setattr(Arena, "_populate", late)
    monkeypatch.setattr(Arena, "wait_mapped", wait)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, make_checkpointer(Path(folder)) as checkpointer:
        checkpointer.warm_up(nbytes=4 << 20)
        assert mapped and mapped[0] is not None


def test_warming_up_on_a_disk_maps_the_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "on_ramdisk", lambda path: False)
    monkeypatch.setattr(arena_module, "stores_may_end_the_process", lambda path: False)
    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.warm_up(nbytes=4 << 20, slots=2)
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".free" in line}
        assert mapped == {str(path) for path in tmp_path.glob(".resiliency/*/files/*.free")} and len(mapped) == 2


def test_the_next_file_on_a_ramdisk_is_mapped_while_the_trainer_does_something_else() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, make_checkpointer(Path(folder)) as checkpointer:
        large = {"w": torch.ones(600_000)}
        checkpointer.warm_up(large, slots=1)
        ticket = checkpointer.save(1, large)
        assert ticket is not None
        ticket.wait(Stage.COMMITTED, timeout=SOON)
        deadline = time.monotonic() + 30
        while ".free" not in Path("/proc/self/maps").read_text():  # no call of the checkpointer is needed for it
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_restart_writes_into_a_file_that_the_attempt_before_had_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the agent still has steps to fsync and partial files to delete: the ranks do not wait for that."""
    warm = threading.Event()
    monkeypatch.setattr(core, "remove_dead_fetches", lambda *_: warm.wait(60))
    large = {"w": torch.ones(600_000)}
    folder = tmp_path / ".resiliency" / RUN / FILES_DIR
    folder.mkdir(parents=True)
    left = folder / f"{environment().node}-a0001-ffffff-0-000001.free"
    left.write_bytes(bytes(3 << 20))
    inode = left.stat().st_ino
    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.warm_up(large, slots=1)
        assert not left.exists() and not warm.is_set()
        warm.set()
        ticket = checkpointer.save(1, large)
        assert ticket is not None
        ticket.wait(Stage.COMMITTED, timeout=SOON)
        (step,) = step_dirs(tmp_path).values()
        assert (step / "shard-00000.shard").stat().st_ino == inode
        assert differences(checkpointer.load().state, large) == []  # type: ignore[union-attr]


def test_a_step_that_gives_way_to_a_newer_one_while_it_is_loaded_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load right after a save lists the step before, and the agent then commits the save and deletes that step."""
    with make_checkpointer(LocalTierOptions(directory=str(tmp_path), keep=None)) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
        folders = {step.step: folder for step, folder in step_dirs(tmp_path).items()}
        folders[2].rename(tmp_path / "later")
        real, asked = shard_access.read_record, []

        def read_record(*arguments: Any) -> Any:
            if not asked:
                shutil.rmtree(folders[1])
                (tmp_path / "later").rename(folders[2])
            asked.append(arguments)
            return real(*arguments)

        monkeypatch.setattr(shard_access, "read_record", read_record)
        restored = checkpointer.load()
        assert restored is not None and restored.step == 2 and len(asked) == 2
        assert differences(restored.state, make_state(2)) == []


def test_an_agent_remembers_what_it_committed_and_need_not_open_it(checkpointer: Checkpointer, tmp_path: Path) -> None:
    """A file that it had opened to read would not be used again."""
    ticket = save(checkpointer, 1, names=["a.ckpt"])
    found = known_files.recall(str(tmp_path / "c" / "a.ckpt"))
    assert found is not None and (found.id, found.run, found.rank, found.replicated) == (ticket.id, RUN, 0, True)
    with open(tmp_path / "c" / "a.ckpt", "rb") as file:
        assert found == read_identity(file.read(IDENTITY_BYTES), where="")
    os.utime(tmp_path / "c" / "a.ckpt")  # somebody has written into it
    assert known_files.recall(str(tmp_path / "c" / "a.ckpt")) is None


@pytest.mark.parametrize("when", ["before the rank hears of the commit", "after"])
def test_a_file_that_a_user_writes_in_the_place_of_a_checkpoint_is_not_taken_for_one(
    when: str, checkpointer: Checkpointer, tmp_path: Path
) -> None:
    path = tmp_path / "c" / "a.ckpt"
    ticket = checkpointer.save(1, make_state(1), names=["a.ckpt"])
    assert ticket is not None
    if when == "after":
        ticket.wait(Stage.DURABLE, timeout=SOON)
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    inode = path.stat().st_ino
    torch.save({"mine": 1}, path)
    assert path.stat().st_ino == inode
    ticket.wait(timeout=SOON)
    assert is_stock(str(path))
    save(checkpointer, 2, names=["b.ckpt"], supersedes=["a.ckpt"])
    save(checkpointer, 3, names=["c.ckpt"], supersedes=["b.ckpt"])
    assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
    assert torch.load(path) == {"mine": 1} and not (tmp_path / "c" / "b.ckpt").exists()


def test_saves_take_turns_in_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To fill a new file with zeros for each save, and delete an old one, took a third of a core in a training loop."""
    filled: list[str] = []
    real = file_pool.write_zeros

    def write_zeros(fd: int, start: int, end: int, **named: Any) -> None:
        filled.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd, start, end, **named)

    monkeypatch.setattr(file_pool, "write_zeros", write_zeros)
    large = {"w": torch.ones(600_000)}
    with make_checkpointer(LocalTierOptions(directory=str(tmp_path), keep=1, keep_named=False)) as checkpointer:
        checkpointer.warm_up(large)
        for step in range(1, 21):
            ticket = checkpointer.save(step, large)
            assert ticket is not None
            checkpointer.delete(f"of step {step}.ckpt")  # as a callback does right after a save
            ticket.wait(Stage.DURABLE, timeout=SOON)
            checkpointer.flush(timeout=SOON)
            # Between two saves of a job there is time for that; a save right now might find none ready, and fill one.
            assert host_agent(checkpointer)._files._worker.wait_idle(time.monotonic() + 20)
        # Four to begin with; without turns each of the 20 has a new one.
        assert len(set(filled)) <= 5


@pytest.mark.parametrize("lazy", [True, False])
def test_where_a_store_may_need_a_disk_block_files_are_only_written(
    lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Btrfs a store into a mapping ended the trainer with SIGBUS when the disk was full."""
    monkeypatch.setattr("resiliency.checkpoint.arena.stores_may_end_the_process", lambda path: True)
    real = ctypes.memmove

    def memmove(target: int, source: int, nbytes: int) -> int:
        slots = [slot for slot in arena._open_slots.values() if slot.fd >= 0]
        assert not any(slot.address <= target < slot.address + slot.nbytes for slot in slots), "a store"
        return int(real(target, source, nbytes))

    monkeypatch.setattr(ctypes, "memmove", memmove)
    state = {"w": torch.randn(3_000_000), "b": torch.randn(7)}
    with make_checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            state["w"].add_(1)
            ticket = checkpointer.save(step, state, lazy=lazy)
            assert ticket is not None
            checkpointer.fence()
            ticket.wait(Stage.COMMITTED, timeout=SOON)
    with make_checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and restored.step == 3
        assert differences(restored.state, state) == []


def test_warming_up_for_a_small_state_waits_for_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent prepares none, and a wait would last until its deadline."""
    with make_checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(SaveTracker, "wait", lambda *args: pytest.fail("it waits"))
        checkpointer.warm_up({"w": torch.ones(1000)})


def test_warming_up_for_a_state_that_does_not_exist_yet(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.warm_up_for({"w": torch.empty(5000, 4, device="meta")}, slots=1)
        save(checkpointer, 1, {"w": torch.ones(5000, 4)})


# ---- several ranks


def test_a_coordinator_says_which_rank_this_is_and_that_of_another_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another rank's, both would write one rank's shard, and wait for the other's."""
    from torch.distributed import HashStore

    from resiliency.checkpoint.coordinator import StoreCoordinator

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    second = StoreCoordinator(HashStore(), rank=1, world_size=2, prefix="p")
    made = Checkpointer(tmp_path, run=RUN, coordinator=second)
    assert (made.rank, made.world_size) == (1, 2)
    for wrong in ({"rank": 0}, {"world_size": 3}, {"rank": 0, "world_size": 2}):
        with pytest.raises(ConfigError, match="was given the coordinator of rank 1 of 2"):
            Checkpointer(tmp_path, run=RUN, coordinator=second, **wrong)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    from dataclasses import replace

    from torch.distributed import HashStore

    from resiliency.checkpoint.coordinator import StoreCoordinator

    coordinator = StoreCoordinator(HashStore(), rank=0, world_size=2, prefix="p")
    checkpointer = make_checkpointer(
        tmp_path, coordinator, options=replace(QUICK, agree_timeout=timedelta(seconds=0.3))
    )
    with pytest.raises(Timeout, match=r"\[1\] of 2"):
        checkpointer.open()
    checkpointer.close()


def test_small_and_unreplicated_tensors_come_from_rank_0(tmp_path: Path) -> None:
    def work(rank: int, coordinator: Coordinator) -> Any:
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            own = torch.full((2000,), float(rank))
            state = {
                "small": torch.tensor(float(rank)),
                "same": torch.ones(2000),
                "own": own,
                "python": rank,
            }
            ticket = checkpointer.save(1, state, replicated=lambda tensor: tensor is not own)
            assert ticket is not None
            ticket.wait(timeout=SOON)
            restored = checkpointer.load()
            return restored and restored.state

    for state in run_ranks(2, work):
        assert (
            differences(
                state, {"small": torch.tensor(0.0), "same": torch.ones(2000), "own": torch.zeros(2000), "python": 0}
            )
            == []
        )


def test_all_ranks_get_the_same_attempt_and_no_two_starts_the_same(tmp_path: Path) -> None:
    def work(rank: int, coordinator: Coordinator) -> tuple[int, str]:
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            return checkpointer.session.attempt, checkpointer.session.token

    first, second = run_ranks(3, work), run_ranks(2, work)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0][0] == 1 and second[0][0] == 2 and first[0][1] != second[0][1]


@pytest.mark.parametrize("agent", ["process", "embedded"])
def test_of_two_jobs_that_start_at_the_same_moment_on_two_hosts_one_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: Any
) -> None:
    options = dataclasses.replace(QUICK, agent=agent)
    for counted, none in (("read_attempt", 0), ("largest_claim", 0), ("largest_of_steps", (0, 0))):
        # Neither saw anything of the other when it looked.
        monkeypatch.setattr(session, counted, lambda *_, none=none: none)
    monkeypatch.setenv("RESILIENCY_NODE", "host-a")
    with make_checkpointer(tmp_path, options=options) as first:
        save(first, 1)
        monkeypatch.setenv("RESILIENCY_NODE", "host-b")
        second = make_checkpointer(tmp_path, options=options)
        with pytest.raises(AgentError, match=r"another job took attempt 1 .* at the same moment"):
            second.open()
        second.close()
        save(first, 2)
        assert load(first).step == 2


def test_a_broken_attempt_file_does_not_matter(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
    for text in ("", "not a number", "9" * 5000):
        (tmp_path / ".resiliency" / RUN / "attempt").write_text(text)
        with make_checkpointer(tmp_path) as checkpointer:
            assert checkpointer.session.attempt >= 2
            assert load(checkpointer).step == 1


def test_info_of_a_step_is_in_its_record(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1, info={"epoch": 3, "nan": float("nan")})
    (folder,) = step_dirs(tmp_path).values()
    assert json.loads((folder / "manifest.json").read_text())["shards"][0]["info"]["epoch"] == 3


def test_failures_raise_only_from_wait(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        faultpoints.arm("agent.record.write:full")
        ticket = checkpointer.save(1, make_state(1))
        assert ticket is not None
        with pytest.raises(ResiliencyError, match="step 1 failed"):
            ticket.wait(timeout=SOON)
        assert ticket.failed


def test_a_rank_that_leaves_first_and_takes_the_store_with_it(tmp_path: Path) -> None:
    """Rank 0 holds the store of a job without a launcher of its own; the others' last save must still become whole."""
    from torch.distributed import HashStore

    from resiliency.checkpoint.coordinator import StoreCoordinator

    store, gone, counted = HashStore(), threading.Event(), threading.Event()

    class Leaving(StoreCoordinator):
        def count(self, topic: str, amount: int) -> int:
            if self.rank == 1:
                counted.set()
                assert gone.wait(20)
                raise torch.distributed.DistNetworkError("connection reset")
            return super().count(topic, amount)

    def work(rank: int, _: Coordinator) -> None:
        coordinator = Leaving(store, rank=rank, world_size=2, prefix="leaving")
        remotes = [RemoteTierOptions(address=str(tmp_path / "r"))]
        local = LocalTierOptions(directory=str(tmp_path / "c"), shared=True)
        checkpointer = make_checkpointer(local, coordinator, remotes=remotes)
        checkpointer._environment = replace(checkpointer._environment, node=f"host{rank}")
        checkpointer.open()
        try:
            if rank == 0:
                assert counted.wait(20)  # rank 1's shard is recorded, and its agent has seen that rank 0's is not
            ticket = checkpointer.save(1, make_state(1))
            assert ticket is not None
            ticket.wait(timeout=timedelta(seconds=5))
            # Rank 1 has not counted, and never will: rank 0 cannot wait for it.
            checkpointer.flush(Stage.DURABLE, timeout=timedelta(seconds=0.5 if rank == 0 else 5))
        finally:
            checkpointer.close(flush=False)
            gone.set()

    run_ranks(2, work)
    assert [folder for folder in step_dirs(tmp_path / "c").values() if (folder / "manifest.json").exists()]
    records = {path.name for folder in step_dirs(tmp_path / "r").values() for path in folder.glob("*.json")}
    assert "shard-00001.json" in records, "rank 1's part was never sent"


class _FactoriesNeedADevice(TorchFunctionMode):
    """What ``torch.set_default_device`` is made of. Tensors that are made without a device would be elsewhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = kwargs or {}
        if func in _device_constructors() and made.get("device") is None:
            raise AssertionError(f"{func.__name__} without a device")
        return func(*args, **made)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_default_device_of_the_user_is_not_used_by_the_engine(checkpointer: Checkpointer, lazy: bool) -> None:
    """A wrong one ended the process: bytes were copied to the address of a tensor that is on another device."""
    state = {**make_state(1), "turned": torch.arange(12.0).view(3, 4).t(), "small": torch.ones(3)}
    other = {**make_state(2), "turned": torch.zeros(4, 3), "small": torch.zeros(3)}
    with _FactoriesNeedADevice():
        save(checkpointer, 1, state, per_rank={"rng": torch.get_rng_state()}, lazy=lazy, names=["a.ckpt"])
        got = load(checkpointer)
        filled = load(checkpointer, into=other)
        located = locate(str(Path(checkpointer.directory, "a.ckpt")))
        assert located is not None
        by_path, _ = load_path(located)
    assert differences(got.state, state) == differences(filled.state, state) == differences(by_path, state) == []
    with torch.device("meta"):
        save(checkpointer, 2, state, per_rank={"rng": torch.get_rng_state()}, lazy=lazy)
        assert differences(load(checkpointer).state, state) == []
