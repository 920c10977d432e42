"""What a monitor says arrives whole, and as one plain line."""

from __future__ import annotations

from dataclasses import replace

from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.supervisor.claims import of_host


def test_no_field_of_an_observation_is_lost_and_texts_are_one_line() -> None:
    one = Observation(
        kind=ObservationKind.WORKER_LOST,
        host="host-a",
        workload="job",
        generation=3,
        rank=1,
        device="0000:04:00.0",
        device_class=DeviceClass.SOFT,
        exit_code=7,
        detail="exit status 7: no data",
    )
    assert of_host(one, "host-a") == one
    assert of_host(replace(one, detail="a\nb\x1b"), "host-a").detail == "a b"
