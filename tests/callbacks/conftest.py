"""One thread for torch, and the variable a Trainer leaves set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from resiliency import faultpoints


@pytest.fixture(autouse=True)
def small_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    faultpoints.arm("")
