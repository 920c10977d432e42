"""One thread for torch, and the variable a Trainer leaves set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from resiliency import faultpoints


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """In a module's own fixtures, too: what their fits compute is compared with that of other fits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    yield
    faultpoints.arm("")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the first start of a job of a launcher: the run's folder and its event log stay after the fit."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
