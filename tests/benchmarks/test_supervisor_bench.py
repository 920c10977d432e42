"""The supervisor's benchmark runs, and measures what it says; its figures are no test."""

from __future__ import annotations

import pytest

from benchmarks.supervisor import measure


@pytest.mark.nightly
def test_a_small_cluster_is_measured() -> None:
    found = measure(hosts=40, ranks=2, jobs=2, period_s=0.5, steady_s=1.0, burst=4)
    assert found.hosts == 40 and found.burst == 4 and found.messages_per_s > 0
    assert 0 < found.p50_s <= found.p99_s and found.lost_s > 0 and found.burst_s > 0 and found.memory_bytes > 1 << 20
