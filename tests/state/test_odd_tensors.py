"""Tensors without memory of their own, of odd dtypes and layouts: kept bit for bit as torch keeps them, or refused by
their name. Never a process that ends, or whose memory is spoiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import odd_tensors

ROOT = Path(odd_tensors.__file__).parents[1]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What became of each in a process of its own."""
    command = [sys.executable, str(ROOT / "tests" / "odd_tensors.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", odd_tensors.KEPT)
def test_what_torch_keeps_is_kept_bit_for_bit(results: dict[str, Any], name: str) -> None:
    assert results[name] == {"name": name, "exit": 0, "found": []}


@pytest.mark.parametrize("name", odd_tensors.REFUSED)
def test_what_torch_does_not_keep_is_refused_by_its_name_and_the_next_save_works(
    results: dict[str, Any], name: str
) -> None:
    assert results[name] == {"name": name, "exit": 0, "found": []}
