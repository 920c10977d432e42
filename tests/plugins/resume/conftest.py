"""What every exam of exact resume needs: one thread, little output, and the generators of the process as before."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it, and leaves it set
    for package in ("lightning.pytorch", "pytorch_lightning"):
        for part in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector"):
            monkeypatch.setattr(logging.getLogger(f"{package}.{part}"), "disabled", True)
    threads, states = torch.get_num_threads(), (random.getstate(), np.random.get_state(), torch.get_rng_state())
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
