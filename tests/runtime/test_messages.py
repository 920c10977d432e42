"""Messages are checked field by field, ranks of a report too, which are read in a way of their own."""

from __future__ import annotations

import hashlib
import json
from typing import get_args

import pytest

from resiliency.errors import AgentError
from resiliency.runtime.messages.monitor import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Ask,
    Hello,
    Message,
    RankReport,
    Refused,
    Report,
    StepKind,
    Welcome,
    pack,
    unpack,
)
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.runtime.messages.places import Place


def text(**rank: object) -> str:
    fields = json.loads(pack(Report(number=1, ranks=(RankReport(rank=3),))))
    fields["ranks"][0].update(rank)
    return json.dumps(fields)


def test_a_report_comes_back_as_it_was() -> None:
    report = Report(
        number=7, workload="job", generation=2, ranks=(RankReport(rank=3, beats=4, quiet_s=0.5, watched=True),)
    )
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


@pytest.mark.parametrize("kind", [Hello, Welcome])
def test_a_peer_of_another_version_is_told_so_whatever_fields_it_has(kind: type) -> None:
    made = {Hello: Hello(version=1, host="a", incarnation="1"), Welcome: Welcome(version=1, term=1, period_s=1.0)}[kind]
    of_later = {**json.loads(pack(made)), "version": PROTOCOL_VERSION + 1, "of_later": {}}
    for words in (pack(made), json.dumps(of_later)):
        with pytest.raises(AgentError, match="speaks version .* this side version .*install the same version"):
            unpack(words)


def test_messages_are_those_of_this_version_of_the_protocol() -> None:
    """Unknown fields are refused: whoever adds a field, or a kind, raises the version, and then changes this."""
    fields = {kind.__name__: sorted(kind.__dataclass_fields__) for kind in get_args(Message)}
    fields |= {kind.__name__: sorted(kind.__dataclass_fields__) for kind in (Ask, RankReport, Observation, Place)}
    known = hashlib.sha256(json.dumps([fields, sorted(StepKind), sorted(ObservationKind)]).encode()).hexdigest()
    assert (PROTOCOL_VERSION, known[:16]) == (5, "f74861e15821b7db")
    assert list(Refused.__dataclass_fields__) == ["reason"], "of all versions"
