from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from resiliency.supervisor.clusters.kubernetes import api as api_module
from resiliency.supervisor.clusters.kubernetes import cluster as cluster_module
from tests.certificates import Certificates
from tests.cluster.conftest import control_plane, rig, tools  # noqa: F401  fixtures

from .fake_api import FakeApi


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, str]]:
    """That of an authority, and the server's with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl")
    authority = Certificates(tmp_path_factory.mktemp("certificates"), "authority")
    return authority.ca, authority.sign("api", "IP:127.0.0.1")


@pytest.fixture
def fake_api(certificates: tuple[Path, tuple[str, str]], tmp_path: Path) -> FakeApi:
    return FakeApi(*certificates, tmp_path)


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again, or looked at now and then, is so in hundredths of a second."""
    monkeypatch.setattr(api_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(api_module, "_LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(cluster_module, "_LOOK_S", 0.05)
