"""The newest whole checkpoint of some folders, whoever wrote it, and the rank that handles files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.compat import latest
from resiliency.compat.latest import find_latest_checkpoint_path, get_is_checkpoint_file_handler
from resiliency.errors import ConfigError
from resiliency.testing.checkpoints import flip_bits

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for file in files:
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_text("x")
    return path


def stock(path: Path, step: int) -> Path:
    torch.save({"global_step": step, "w": torch.zeros(100)}, path)
    return path


def ours(root: Path, step: int, name: str) -> None:
    with Checkpointer(str(root), options=CheckpointerOptions(agent="embedded")) as checkpointer:
        ticket = checkpointer.save(step, {"global_step": step, "w": torch.zeros(100)}, names=[name])
        assert ticket is not None
        ticket.wait()


def test_nothing_is_none(tmp_path: Path) -> None:
    assert find_latest_checkpoint_path(None) is None
    assert find_latest_checkpoint_path(tmp_path) is None
    assert find_latest_checkpoint_path(tmp_path / "not there") is None
    assert find_latest_checkpoint_path([None, str(tmp_path)]) is None


@pytest.mark.parametrize("kind", ["torch", "megatron", "local", "lightning"])
def test_the_largest_step_of_folders_wins(kind: str, tmp_path: Path) -> None:
    files = {
        "torch": (".metadata", "__0_0.distcp"),
        "megatron": ("common.pt", ".metadata", "metadata.json"),
        "local": ("common.pt", "metadata.json", "0/.metadata", "1/.metadata"),
        "lightning": (".metadata", "meta.pt"),
    }[kind]
    for step in (5, 100, 20):
        folder(tmp_path / f"step={step}", *files)
    assert find_latest_checkpoint_path(str(tmp_path)) == tmp_path / "step=100"


def test_a_folder_of_lightning_is_whole_with_its_last_file(tmp_path: Path) -> None:
    folder(tmp_path / "step=5.ckpt", ".metadata", "meta.pt")
    folder(tmp_path / "step=9.ckpt", ".metadata", "__0_0.distcp")
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=5.ckpt"
    (tmp_path / "step=9.ckpt" / "meta.pt").write_text("x")
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=9.ckpt"


def test_files_count_as_folders_do(tmp_path: Path) -> None:
    folder(tmp_path / "step=20", ".metadata")
    stock(tmp_path / "epoch=1-step=30.ckpt", 30)
    stock(tmp_path / "footstep=99.ckpt", 99)  # another word
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "epoch=1-step=30.ckpt"


def test_a_context_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock(tmp_path / "step=3.ckpt", 3)
    folder(tmp_path / "step=9-context", "context.json")
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=3.ckpt"
    assert caplog.records == []


def test_our_files_count_whatever_their_name(tmp_path: Path) -> None:
    stock(tmp_path / "step=30.ckpt", 30)
    ours(tmp_path, 40, "best.ckpt")
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "best.ckpt"


UNFINISHED: dict[str, Any] = {
    "empty folder": (),
    "metadata missing": ("__0_0.distcp",),
    "megatron without the last file": ("common.pt", ".metadata"),
    "one rank of two": ("metadata.json", "0/.metadata", "1/__1_0.distcp"),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_unfinished_folder_never_wins(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder(tmp_path / "step=5", ".metadata")
    folder(tmp_path / "step=9", *UNFINISHED[name])
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=5"
    assert "step=9 is passed over" in caplog.text


@pytest.mark.parametrize("suffix", ["", ".ckpt"])
def test_a_marked_checkpoint_never_wins(suffix: str, tmp_path: Path) -> None:
    folder(tmp_path / "step=5", ".metadata")
    if suffix:
        stock(tmp_path / "step=9.ckpt", 9)
    else:
        folder(tmp_path / "step=9", ".metadata")
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / f"step=9{suffix}"
    (tmp_path / "step=9-unfinished").touch()
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=5"


def test_torn_files_never_win(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock(tmp_path / "step=5.ckpt", 5)
    torn = stock(tmp_path / "step=9.ckpt", 9)
    torn.write_bytes(torn.read_bytes()[:-50])
    (tmp_path / "step=10.ckpt").touch()
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=5.ckpt"
    assert "step=9.ckpt is passed over" in caplog.text and "step=10.ckpt is passed over" in caplog.text


def test_a_damaged_file_of_ours_never_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock(tmp_path / "step=5.ckpt", 5)
    ours(tmp_path, 40, "step=40.ckpt")
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=40.ckpt"
    flip_bits(tmp_path / "step=40.ckpt", [(0, 256)])
    with caplog.at_level(logging.WARNING):
        assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=5.ckpt"


def test_of_equal_steps_the_first_folder_wins(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder(tmp_path / name / "step=7", ".metadata")
    folder(tmp_path / "c" / "step=6", ".metadata")
    order = [tmp_path / "c", None, tmp_path / "b", tmp_path / "a"]
    assert find_latest_checkpoint_path(order) == tmp_path / "b" / "step=7"


@pytest.mark.parametrize("wrong", [7, [7], {"a": 1}])
def test_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="checkpoint_dir"):
        find_latest_checkpoint_path(wrong)


def test_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="resiliency ckpt ls"):
        find_latest_checkpoint_path("gs://bucket/job")


# -- synchronize --------------------------------------------------------------------------------------------------------


def synchronized(monkeypatch: pytest.MonkeyPatch, own: Path, others: list[dict[int, str]]) -> Path | None:
    """As on the first of several ranks."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def gather(into: list[Any], mine: Any) -> None:
        into[:] = [mine, *others]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    return find_latest_checkpoint_path(own, synchronize=True)


def test_ranks_agree_on_the_newest_step_that_all_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        folder(tmp_path / f"step={step}", ".metadata")
    assert find_latest_checkpoint_path(tmp_path) == tmp_path / "step=20"
    assert synchronized(monkeypatch, tmp_path, [{10: "/other/step=10"}]) == tmp_path / "step=10"


def test_a_host_that_is_new_takes_what_the_others_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [{10: "/b/step=10"}, {10: "/c/step=10", 20: "/c/step=20"}]
    assert synchronized(monkeypatch, tmp_path, others) == Path("/c/step=20")
    assert synchronized(monkeypatch, tmp_path, [{}, {}]) is None


def test_synchronize_without_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "step=5", ".metadata")
    assert find_latest_checkpoint_path(tmp_path, synchronize=True) == tmp_path / "step=5"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        find_latest_checkpoint_path(tmp_path, synchronize=True)


# -- the rank that handles files ----------------------------------------------------------------------------------------

WHO = [
    ({}, True, True),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, True, True),
    ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, False, False),
    ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, False, True),
    ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False, True),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False, False),
    ({"RANK": "8", "WORLD_SIZE": "9", "SLURM_LOCALID": "3"}, False, False),
]


@pytest.mark.parametrize(("env", "of_job", "of_host"), WHO, ids=[str(row[0]) for row in WHO])
def test_who_handles_files(env: dict[str, str], of_job: bool, of_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert get_is_checkpoint_file_handler() is of_job
    assert get_is_checkpoint_file_handler(False) is of_job
    assert get_is_checkpoint_file_handler(is_cluster_local_checkpointing=True) is of_host


def test_a_rank_that_does_not_know_its_place_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        get_is_checkpoint_file_handler(True)


def test_the_process_group_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(latest.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(latest.dist, "get_world_size", lambda: 2)
    assert get_is_checkpoint_file_handler() is False
