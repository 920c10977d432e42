from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.zygote import Zygote
from tests.launch.launching import Job


@pytest.fixture(autouse=True)
def agents_are_made_by_launchers(started_agents: None) -> None:
    """And not forked as those of other tests are; see :mod:`tests.agent_forks`."""


@pytest.fixture
def launch(tmp_path: Path, zygote: Zygote) -> Iterator[Any]:
    jobs: list[Job] = []

    def start(
        script: str, *flags: Any, arguments: Sequence[Any] = (), launcher: str = "ours", env: Mapping[str, str] = {}
    ) -> Job:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(script))
        words = [*flags, path, *arguments] if script else [*flags, *arguments]
        job = Job(launcher, words, tmp_path / f"output-{len(jobs)}", zygote, cwd=tmp_path, env=env)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.close()
