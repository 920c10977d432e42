from __future__ import annotations

import pytest

from resiliency.testing.zygote import Zygote

from .supervisor_command import Command


@pytest.fixture
def forked_supervisors(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors of this test that are processes of their own are forks."""
    monkeypatch.setattr(Command, "zygote", zygote)
