"""The GCS emulator, once for all tests of the tiers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resiliency.testing.gcs_server import FakeGcs, GcsFolder


@pytest.fixture(scope="session")
def gcs() -> Iterator[FakeGcs]:
    with pytest.MonkeyPatch.context() as patch, FakeGcs() as server:
        for name, value in server.GCSFS_ENVIRONMENT.items():
            patch.setenv(name, value)
        from fsspec import get_filesystem_class

        assert get_filesystem_class("gs").__module__ == "gcsfs.core", (
            "gcsfs was imported before its environment was set; every call would wait a minute for gRPC"
        )
        server.create_bucket("bucket")
        yield server


@pytest.fixture
def bucket(gcs: FakeGcs) -> GcsFolder:
    """An empty folder of its own in the emulator's bucket."""
    return gcs.folder("bucket")
