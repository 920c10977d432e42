"""What the monitor of a host says, and what counts of it."""

from __future__ import annotations

from resiliency.launch.orders import Orders, Wish
from resiliency.runtime.messages.places import Place


def _place(generation: int, *, master: str = "10.0.0.1:4000") -> Place:
    return Place(workload="job", generation=generation, node_rank=1, nodes=3, master=master)


def test_the_newest_place_counts_and_one_of_the_past_changes_nothing() -> None:
    orders = Orders()
    assert orders.wish is Wish.UNKNOWN and not orders.ends_ranks
    assert orders.give(_place(2)) and orders.give(_place(4, master=""))
    assert not orders.give(_place(3))
    assert orders.is_to_start and orders.place is not None
    assert orders.place.generation == 4 and orders.place.master == ""
    assert orders.give(_place(4)), "its address is known now"
    assert orders.start().master == "10.0.0.1:4000"
    assert not orders.is_to_start and not orders.ends_ranks
    assert orders.give(_place(4)) and not orders.ends_ranks, "said again"
    assert not orders.give(_place(2)) and not orders.ends_ranks
    assert orders.give(_place(5)) and orders.ends_ranks
    assert orders.current is not None and orders.current.generation == 4


def test_a_place_that_was_withdrawn_is_taken_when_it_is_given_again_unless_its_ranks_have_run() -> None:
    orders = Orders()
    orders.give(_place(1))
    orders.withdraw()
    assert orders.ends_ranks and not orders.is_to_start
    orders.give(_place(1))
    assert orders.is_to_start
    orders.start()
    orders.withdraw()
    orders.give(_place(1))
    assert not orders.is_to_start
    orders.complete()
    assert orders.ends_ranks and orders.wish is Wish.COMPLETED
