"""Messages are checked field by field, ranks of a report too, which are read in a way of their own."""

from __future__ import annotations

import json

import pytest

from resiliency.errors import AgentError
from resiliency.supervisor.messages import MAX_MESSAGE_BYTES, RankReport, Report, pack, unpack


def text(**rank: object) -> str:
    fields = json.loads(pack(Report(number=1, ranks=(RankReport(rank=3),))))
    fields["ranks"][0].update(rank)
    return json.dumps(fields)


def test_a_report_comes_back_as_it_was() -> None:
    report = Report(number=7, workload="job", epoch=2, ranks=(RankReport(rank=3, beats=4, quiet_s=0.5, watched=True),))
    assert unpack(pack(report)) == report
    assert unpack('{"type": "Report", "number": 1, "ranks": [{"rank": 2}]}') == Report(
        number=1, ranks=(RankReport(rank=2),)
    )


@pytest.mark.parametrize(
    "rank",
    [{"rank": "3"}, {"rank": True}, {"beats": 1.5}, {"watched": 1}, {"quiet_s": "0"}, {"more": 1}, {"phase": None}],
)
def test_a_rank_with_a_wrong_field_is_refused(rank: dict[str, object]) -> None:
    with pytest.raises(AgentError, match="RankReport"):
        unpack(text(**rank))


@pytest.mark.parametrize(
    "bad",
    ["", "x", "[]", "{}", '{"type": "Nothing"}', '{"type": "Report"}', "[" * 100_000, " " * (MAX_MESSAGE_BYTES + 1)],
)
def test_garbage_is_refused(bad: str) -> None:
    with pytest.raises(AgentError):
        unpack(bad)
