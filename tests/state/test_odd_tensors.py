"""Tensors without memory of their own, of odd dtypes and layouts: kept bit for bit as torch keeps them, or refused by
their name. Never a process that ends, or whose memory is spoiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from resiliency.testing.zygote import Zygote
from tests import odd_tensors

RUN = "tests.odd_tensors:run"


@pytest.mark.parametrize("name", odd_tensors.KEPT)
def test_what_torch_keeps_is_kept_bit_for_bit(zygote: Zygote, name: str, tmp_path: Path) -> None:
    assert odd_tensors.found_by(zygote, RUN, tmp_path, kind="kept", name=name) == []


@pytest.mark.parametrize("name", odd_tensors.REFUSED)
def test_what_torch_does_not_keep_is_refused_by_its_name_and_the_next_save_works(
    zygote: Zygote, name: str, tmp_path: Path
) -> None:
    assert odd_tensors.found_by(zygote, RUN, tmp_path, kind="refused", name=name) == []
