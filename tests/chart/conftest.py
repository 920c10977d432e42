"""Both versions of Helm, for the tests of the charts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chart.rendering import Helm
from tests.cluster.conftest import control_plane, tools

__all__ = ["control_plane", "helm", "helm4", "tools"]


@pytest.fixture(params=["helm", "helm3"])
def helm(request: pytest.FixtureRequest, tools: Path, tmp_path: Path) -> Helm:
    """Helm 4, and once more Helm 3."""
    if not os.access(tools / request.param, os.X_OK):
        pytest.skip(f"{tools} has no {request.param}")
    return Helm(tools / request.param, tmp_path)


@pytest.fixture
def helm4(tools: Path, tmp_path: Path) -> Helm:
    return Helm(tools / "helm", tmp_path)
