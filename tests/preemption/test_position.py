"""All ranks stop at the end of one batch, whenever they hear of it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.preemption.notice import Notice
from resiliency.preemption.position import Position, stop_after


@settings(deadline=None, database=None, max_examples=300)
@given(data=st.data())
def test_no_rank_passes_the_agreed_batch_and_each_gets_there(data: st.DataObject) -> None:
    """Ranks train in lockstep: none ends a batch before all have begun it. Any of them goes on at each turn."""
    ranks = data.draw(st.integers(1, 4))
    positions = [Position() for _ in range(ranks)]
    begun, ended, stopped = [0] * ranks, [0] * ranks, [0] * ranks
    published: dict[int, int] = {}
    told = False
    # Drawn as one string: a turn is a byte. Three draws for each of 400 turns would take most of a minute.
    for turn in data.draw(st.binary(min_size=400, max_size=400)):
        turn, rank = divmod(turn, ranks)
        turn, chosen = divmod(turn, 4)
        action = ["train", "train", "publish", "hear"][chosen]
        if action == "publish" and (told or turn % 2):
            told = True
            published[rank] = positions[rank].publish()
        elif action == "hear" and len(published) == ranks:
            positions[rank].decided(stop_after(list(published.values())))
        elif action == "train" and not stopped[rank]:
            if begun[rank] == ended[rank]:
                positions[rank].batch_began()
                begun[rank] += 1
            elif min(begun) >= begun[rank]:
                waits = rank in published and begun[rank] >= published[rank]
                if waits and not positions[rank]._known.is_set():
                    continue  # it would wait here
                ended[rank] += 1
                if positions[rank].batch_ended(timeout_s=0):
                    stopped[rank] = ended[rank]
    if len(published) == ranks:
        stop = stop_after(list(published.values()))
        assert max(ended) <= stop
        assert set(stopped) <= {0, stop}
        for rank in range(ranks):
            positions[rank].decided(stop)
        for _ in range(stop + 1):  # those that have not stopped can all go there
            for rank in range(ranks):
                if not stopped[rank] and begun[rank] == ended[rank]:
                    positions[rank].batch_began()
                    begun[rank] += 1
            for rank in range(ranks):
                if not stopped[rank] and begun[rank] > ended[rank]:
                    ended[rank] += 1
                    if positions[rank].batch_ended(timeout_s=0):
                        stopped[rank] = ended[rank]
        assert stopped == [stop] * ranks


def test_a_rank_that_has_published_waits_at_the_end_of_that_batch() -> None:
    position = Position()
    position.batch_began()
    assert not position.batch_ended(timeout_s=0)
    position.batch_began()
    assert position.publish() == 2
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(position.batch_ended(timeout_s=30)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not answers
    position.decided(2)
    thread.join(10)
    assert answers == [True]


def test_without_an_agreement_nobody_stops_or_waits() -> None:
    position = Position()
    position.batch_began()
    position.publish()
    position.decided(None)
    assert not position.batch_ended(timeout_s=30)


def test_a_notice_goes_over_the_wire_and_nonsense_does_not() -> None:
    notice = Notice(source="SIGTERM", rank=3, grace_s=25.0, signal=15)
    assert Notice.from_bytes(notice.to_bytes()) == notice
    for data in (b"", b"{}", b"[]", b"\xff", b'{"source": "x", "rank": 0, "grace_s": -1, "signal": 0}', b"null"):
        with pytest.raises(ValueError):
            Notice.from_bytes(data)
