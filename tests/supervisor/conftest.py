from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.testing.zygote import Zygote

from .supervisor_command import PRELOAD, Command


@pytest.fixture(scope="session")
def forked_supervisors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Supervisors that are processes of their own are forks of one that has imported what they need."""
    log = tmp_path_factory.mktemp("supervisors") / "log"
    with Zygote(PRELOAD, log=str(log), path=[str(Path(__file__).parents[2])]) as made:
        Command.zygote = made
        yield
        Command.zygote = None
