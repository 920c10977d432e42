"""Checkpoints of format 1: refused with a sentence wherever one may be met, and left as they are.

The sample was written by the last version that had that format: a run "train" with one step, 10, of one rank.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore
from typer.testing import CliRunner

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.coordinator import Coordinator, StoreCoordinator
from resiliency.checkpoint.options import CheckpointerOptions, RemoteTierOptions
from resiliency.cli.ckpt import app
from resiliency.errors import UnsupportedFormat
from resiliency.inspection.by_path import locate
from tests.callbacks.harness import loader, make_net, make_trainer, ours

SAMPLE = Path(__file__).parent / "samples" / "format-1"
STEP = ".resiliency/train/steps/0000000010-a0001-b19d0e00"
SENTENCE = "has checkpoint format 1, this version reads 2: export it with the version of resiliency that wrote it"
OPTIONS = CheckpointerOptions(agent="embedded", agree_timeout=timedelta(seconds=20))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "old"))


def contents(folder: Path) -> dict[str, bytes]:
    """Checkpoint files by path; what an attempt notes of itself (logs, its number) left out."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if "/steps/" in str(path)}


def test_a_directory_with_steps_of_format_1_cannot_be_opened(old: Path) -> None:
    before = contents(old)
    with pytest.raises(UnsupportedFormat, match=SENTENCE):
        Checkpointer(str(old), run="train", rank=0, world_size=1, options=OPTIONS).load()
    assert contents(old) == before


def test_a_remote_tier_with_steps_of_format_1_is_refused_by_every_rank(old: Path, tmp_path: Path) -> None:
    """Only rank 0 lists remote tiers; the others must not go on without it."""
    store = HashStore()

    def opened(rank: int) -> str:
        coordinator: Coordinator = StoreCoordinator(store, rank=rank, world_size=2, prefix="x")
        checkpointer = Checkpointer(
            str(tmp_path / "new"),
            run="train",
            remotes=[RemoteTierOptions(address=str(old))],
            rank=rank,
            world_size=2,
            coordinator=coordinator,
            options=OPTIONS,
        )
        with pytest.raises(UnsupportedFormat) as caught:
            checkpointer.open()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert all(SENTENCE in message for message in pool.map(opened, range(2)))


def test_another_run_in_the_same_directory_is_not_disturbed(old: Path) -> None:
    with Checkpointer(str(old), run="other", rank=0, world_size=1, options=OPTIONS) as checkpointer:
        assert checkpointer.load() is None
        ticket = checkpointer.save(1, {"x": 1})
        assert ticket is not None
        ticket.wait()
    assert (old / STEP / "manifest.json").exists()


@pytest.mark.parametrize("path", ["step=10.ckpt", STEP, ".resiliency/train"])
def test_a_path_into_format_1_is_refused(old: Path, path: str) -> None:
    with pytest.raises(UnsupportedFormat, match=SENTENCE):
        locate(str(old / path))


@pytest.mark.parametrize("command", ["ls", "verify", "inspect", "prune"])
def test_the_command_line_says_it_in_one_line(old: Path, command: str) -> None:
    before = contents(old)
    words = [command, str(old), *(["--keep", "1", "--yes"] if command == "prune" else [])]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert SENTENCE in result.stderr and result.stderr.count("\n") == 1
    assert contents(old) == before


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_a_training_does_not_start_over_beside_them(old: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training from scratch where a checkpoint lies would be a silent loss."""
    monkeypatch.setenv("RESILIENCY_RUN", "train")
    module = make_net(namespace)
    callback = ours(namespace, old, every_n_train_steps=1, options=OPTIONS)
    trainer = make_trainer(namespace, [callback], root=old, max_steps=2)
    with pytest.raises(UnsupportedFormat, match=SENTENCE):
        trainer.fit(module, loader(), loader())
    assert module.ran == 0
