"""A loader that forgets its restored position only at its end, which Lightning does not read up to, is brought there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.plugins.resume.resume_cases import (
    FEATURES,
    Case,
    assert_equal_to,
    chosen,
    everything,
    run,
    second_batch,
    stateful_loader,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice about workers, logging and small data
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Streaming:
    """Restored, it begins at its restored position until a pass has come to its end, as litData's loader does.

    Args:
        moves: that position moves on with the batches; else each pass begins where it was loaded.
    """

    def __init__(self, *, moves: bool, length: int = 6, says: int | None = None) -> None:
        self.moves, self.length, self.says = moves, length, says or length
        self.at, self.start, self.restored = 0, 0, False

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.restored:
            self.at = 0
        elif not self.moves:
            self.at = self.start
        while self.at < self.length:
            self.at += 1
            yield torch.full((3, FEATURES), float(self.at) / 7)
        self.restored = False

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.at = state["at"]
        self.restored = True


class StreamingData(IterableDataset[torch.Tensor]):
    """The same as a dataset, so that the loader around it reads as many samples as it says it has."""

    def __init__(self) -> None:
        self.stream = Streaming(moves=True)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.stream

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


@pytest.mark.parametrize("moves", [True, False])
def test_every_epoch_is_whole(moves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(loaders=lambda: Streaming(moves=moves))
    whole = run(case, tmp_path, save=everything)
    assert len(whole.losses) == 18
    assert_equal_to(whole, case, tmp_path, chosen(whole.saves, str(moves)))
    assert "exact resume" not in caplog.text


def test_short_epoch_after_a_resume_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(loaders=lambda: stateful_loader(StreamingData(), batch_size=None))
    save = run(case, tmp_path, save=second_batch).saves[0]
    assert "exact resume" not in caplog.text
    resumed = run(case, tmp_path, ckpt=save.path)
    assert len(resumed.losses) == 4 + 6  # the second epoch is empty
    lines = [line.getMessage() for line in caplog.records if "exact resume" in line.getMessage()]
    assert lines == [
        "exact resume: StatefulDataLoader ended after 0 of 6 batches, right after a resume: it does not leave its"
        " restored position. Reset the position where its iteration begins"
    ]


@pytest.mark.parametrize("says", [5, 8])
def test_nothing_is_said_of_a_loader_with_a_wrong_length(
    says: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With fewer batches than it says, no epoch was ever whole; with more, Lightning leaves the rest out."""

    class Sized(IterableDataset[torch.Tensor]):
        def __len__(self) -> int:
            return says

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(6, 3, FEATURES))

    case = Case(loaders=lambda: DataLoader(Sized(), batch_size=None))
    whole = run(case, tmp_path, save=everything)
    assert len(whole.losses) == 3 * min(says, 6)
    assert_equal_to(whole, case, tmp_path, chosen(whole.saves, str(says)))
    assert "exact resume" not in caplog.text


@pytest.mark.parametrize("settings", [{"limit_train_batches": 3}, {"max_steps": 9}], ids=str)
def test_nothing_is_said_of_a_fit_that_stops_early(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(loaders=lambda: stateful_loader(StreamingData(), batch_size=None), trainer=settings)
    save = run(case, tmp_path, save=second_batch, max_epochs=2).saves[0]
    run(case, tmp_path, ckpt=save.path, max_epochs=1)
    assert "exact resume" not in caplog.text


def test_one_batch_too_many_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(loaders=lambda: Streaming(moves=True, length=8, says=6))
    save = run(case, tmp_path, save=second_batch).saves[0]
    run(case, tmp_path, ckpt=save.path)
    assert "Streaming has more batches than its length says" in caplog.text
