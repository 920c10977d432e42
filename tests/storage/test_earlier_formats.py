"""Checkpoints of formats 1 and 2: refused with a sentence wherever one may be met, and left as they are.

The samples were written by the last versions that had these formats: a run "train" with one step, 10, of one rank, and
a run "pretrain" with step 10 of two ranks.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

SAMPLES = Path(__file__).parent / "samples"
OPTIONS = CheckpointerOptions(agent="embedded", agree_timeout=timedelta(seconds=20))


@dataclass(frozen=True)
class Old:
    """A copy of a sample: its folder, its run, the folder of its step, and what is said of it."""

    root: Path
    run: str
    step: str
    sentence: str


@pytest.fixture(params=[(1, "train", "0000000010-a0001-b19d0e00"), (2, "pretrain", "0000000010-a0001-553574-00")])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Old:
    version, run, step = request.param
    return Old(
        root=Path(shutil.copytree(SAMPLES / f"format-{version}", tmp_path / "old")),
        run=run,
        step=f".resiliency/{run}/steps/{step}",
        sentence=f"has checkpoint format {version}, this version reads 3, 4 and 5:"
        " export it with the version of resiliency that wrote it",
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Checkpoint files by path; what an attempt notes of itself (logs, its number) left out."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if "/steps/" in str(path)}


def test_a_directory_with_steps_of_an_earlier_format_cannot_be_opened(old: Old) -> None:
    before = contents(old.root)
    with pytest.raises(UnsupportedFormat, match=old.sentence):
        Checkpointer(str(old.root), run=old.run, rank=0, world_size=1, options=OPTIONS).load()
    assert contents(old.root) == before


def test_a_remote_tier_with_steps_of_an_earlier_format_is_refused_by_every_rank(old: Old, tmp_path: Path) -> None:
    """Only rank 0 lists remote tiers; the others must not go on without it."""
    store = HashStore()

    def opened(rank: int) -> str:
        coordinator: Coordinator = StoreCoordinator(store, rank=rank, world_size=2, prefix="x")
        checkpointer = Checkpointer(
            str(tmp_path / "new"),
            run=old.run,
            remotes=[RemoteTierOptions(address=str(old.root))],
            rank=rank,
            world_size=2,
            coordinator=coordinator,
            options=OPTIONS,
        )
        with pytest.raises(UnsupportedFormat) as caught:
            checkpointer.open()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert all(old.sentence in message for message in pool.map(opened, range(2)))


def test_another_run_in_the_same_directory_is_not_disturbed(old: Old) -> None:
    with Checkpointer(str(old.root), run="other", rank=0, world_size=1, options=OPTIONS) as checkpointer:
        assert checkpointer.load() is None
        ticket = checkpointer.save(1, {"x": 1})
        assert ticket is not None
        ticket.wait()
    assert (old.root / old.step / "manifest.json").exists()


@pytest.mark.parametrize("path", ["step=10.ckpt", "{step}", ".resiliency/{run}"])
def test_a_path_into_an_earlier_format_is_refused(old: Old, path: str) -> None:
    with pytest.raises(UnsupportedFormat, match=old.sentence):
        locate(str(old.root / path.format(step=old.step, run=old.run)))


@pytest.mark.parametrize("command", ["ls", "verify", "inspect", "prune"])
def test_the_command_line_says_it_in_one_line(old: Old, command: str) -> None:
    before = contents(old.root)
    words = [command, str(old.root), *(["--keep", "1", "--yes"] if command == "prune" else [])]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert old.sentence in result.stderr and result.stderr.count("\n") == 1
    assert contents(old.root) == before


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_a_training_does_not_start_over_beside_them(old: Old, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training from scratch where a checkpoint lies would be a silent loss."""
    monkeypatch.setenv("RESILIENCY_RUN", old.run)
    module = make_net(namespace)
    callback = ours(namespace, old.root, every_n_train_steps=1, options=OPTIONS)
    trainer = make_trainer(namespace, [callback], root=old.root, max_steps=2)
    with pytest.raises(UnsupportedFormat, match=old.sentence):
        trainer.fit(module, loader(), loader())
    assert module.ran == 0
