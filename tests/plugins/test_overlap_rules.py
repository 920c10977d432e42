"""Which communication is overlapped, for each way to divide a model."""

from __future__ import annotations

from typing import Any

import pytest

from resiliency.errors import ConfigError
from resiliency.plugins.overlap_rules import (
    DDPOverlap,
    MegatronOverlap,
    Parallelism,
    ddp_overlap,
    gradient_overlap,
    model_overlap,
)

MIB = 1024 * 1024
INTERLEAVED = Parallelism(pipeline=4, virtual_pipeline=2, data=2)


def model(parallelism: Parallelism, *, engine: bool = True, **asked: Any) -> dict[str, Any]:
    return model_overlap(parallelism, MegatronOverlap(**asked), transformer_engine=engine)[0]


def gradients(parallelism: Parallelism, **asked: Any) -> dict[str, Any]:
    return gradient_overlap(parallelism, MegatronOverlap(**asked), distributed_optimizer=True)[0]


@pytest.mark.parametrize(
    ("parallelism", "overlap", "batch"),
    [
        (Parallelism(), False, False),
        (Parallelism(pipeline=4), False, True),
        (INTERLEAVED, True, False),
        (Parallelism(pipeline=1, virtual_pipeline=2), False, False),
    ],
)
def test_an_interleaved_pipeline_overlaps_and_another_one_batches(
    parallelism: Parallelism, overlap: bool, batch: bool
) -> None:
    found = model(parallelism)
    assert (found["overlap_p2p_comm"], found["batch_p2p_comm"]) == (overlap, batch)


def test_what_was_asked_of_the_pipeline_is_done() -> None:
    assert model(INTERLEAVED, overlap_p2p_comm=False)["overlap_p2p_comm"] is False
    assert model(INTERLEAVED, overlap_p2p_comm=False)["batch_p2p_comm"] is True
    batched = model(INTERLEAVED, batch_p2p_comm=True)
    assert (batched["overlap_p2p_comm"], batched["batch_p2p_comm"]) == (False, True)
    assert model(Parallelism(pipeline=4), batch_p2p_comm=False)["batch_p2p_comm"] is False
    deferred = model(INTERLEAVED, defer_embedding_wgrad_compute=True, wgrad_deferral_limit=3)
    assert (deferred["defer_embedding_wgrad_compute"], deferred["wgrad_deferral_limit"]) == (True, 3)
    plain = model(INTERLEAVED)
    assert (plain["defer_embedding_wgrad_compute"], plain["wgrad_deferral_limit"]) == (False, -1)


@pytest.mark.parametrize(
    ("parallelism", "asked", "words"),
    [
        (INTERLEAVED, {"overlap_p2p_comm": True, "batch_p2p_comm": True}, "pass one of them"),
        (Parallelism(pipeline=4), {"overlap_p2p_comm": True}, "interleaved"),
        (Parallelism(), {"defer_embedding_wgrad_compute": True}, "one stage"),
        (INTERLEAVED, {"wgrad_deferral_limit": 2}, "defer_embedding_wgrad_compute=True only"),
    ],
)
def test_what_cannot_be_of_a_model_is_refused(parallelism: Parallelism, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model(parallelism, **asked)


def test_overlap_within_tensor_parallel_layers_is_on_where_it_is_asked_for_and_possible() -> None:
    able = Parallelism(tensor=2, sequence_parallel=True)
    assert model(able)["tp_comm_overlap"] is False, "not asked for"
    found, notes = model_overlap(
        able,
        MegatronOverlap(tp_comm_overlap=True, tp_comm_overlap_cfg="cfg", tp_comm_bootstrap_backend="gloo"),
        transformer_engine=True,
    )
    assert (found["tp_comm_overlap"], notes) == (True, [])
    assert (found["tp_comm_overlap_cfg"], found["tp_comm_bootstrap_backend"]) == ("cfg", "gloo")


@pytest.mark.parametrize(
    ("parallelism", "engine", "words"),
    [
        (Parallelism(tensor=1, sequence_parallel=True), True, "at least 2 (it is 1)"),
        (Parallelism(tensor=2), True, "sequence_parallel=True"),
        (Parallelism(tensor=2, sequence_parallel=True), False, "transformer_engine"),
    ],
)
def test_where_it_is_not_possible_it_is_off_and_said(parallelism: Parallelism, engine: bool, words: str) -> None:
    found, (note,) = model_overlap(parallelism, MegatronOverlap(tp_comm_overlap=True), transformer_engine=engine)
    assert found["tp_comm_overlap"] is False and words in note and "it is off" in note


def test_gradients_are_overlapped_where_several_ranks_have_the_same_parameters() -> None:
    assert gradients(Parallelism(pipeline=4)) == {
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "overlap_param_gather_with_optimizer_step": False,
        "align_param_gather": False,
        "bucket_size": None,
    }
    several = gradients(Parallelism(data=2))
    assert (several["overlap_grad_reduce"], several["overlap_param_gather"]) == (True, True)
    assert (several["bucket_size"], several["align_param_gather"]) == (128 * MIB, False)
    assert gradients(INTERLEAVED)["align_param_gather"] is True
    assert gradients(INTERLEAVED)["overlap_param_gather_with_optimizer_step"] is False, "a save would read old weights"


def test_what_was_asked_of_gradients_is_done() -> None:
    assert gradients(Parallelism(data=2), bucket_size=5)["bucket_size"] == 5
    off = gradients(Parallelism(data=2), overlap_grad_reduce=False)
    assert (off["overlap_grad_reduce"], off["overlap_param_gather"]) == (False, False)
    assert gradients(Parallelism(data=2), overlap_param_gather=False)["overlap_param_gather"] is False
    assert gradients(INTERLEAVED, align_param_gather=False)["align_param_gather"] is False
    asked = gradients(INTERLEAVED, overlap_param_gather_with_optimizer_step=True)
    assert asked["overlap_param_gather_with_optimizer_step"] is True


@pytest.mark.parametrize(
    ("parallelism", "asked", "words"),
    [
        (Parallelism(data=2), {"overlap_grad_reduce": False, "overlap_param_gather": True}, "both or neither"),
        (Parallelism(data=2), {"overlap_param_gather_with_optimizer_step": True}, "interleaved"),
    ],
)
def test_what_cannot_be_of_gradients_is_refused(parallelism: Parallelism, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gradients(parallelism, **asked)


def test_without_the_distributed_optimizer_nothing_is_set_and_nothing_may_be_asked() -> None:
    assert gradient_overlap(INTERLEAVED, MegatronOverlap(overlap_grad_reduce=False), distributed_optimizer=False) == (
        {},
        ["gradients are not overlapped: Megatron's distributed optimizer is not used"],
    )
    with pytest.raises(ConfigError, match="bucket_size: these need"):
        gradient_overlap(INTERLEAVED, MegatronOverlap(bucket_size=5), distributed_optimizer=False)


@pytest.mark.parametrize(
    ("mib", "bucket"), [(0.5, None), (1, None), (2, 1), (20, 5), (99, 24.75), (100, None), (4000, None)]
)
def test_a_small_model_gets_four_buckets_and_a_large_one_torchs(mib: float, bucket: float | None) -> None:
    settings, _ = ddp_overlap(DDPOverlap(), configured={}, gradient_bytes=int(mib * MIB))
    assert settings.get("bucket_cap_mb") == bucket


def test_each_argument_of_ddp_is_passed_on() -> None:
    asked = DDPOverlap(bucket_cap_mb=3, gradient_as_bucket_view=False, static_graph=True)
    settings, notes = ddp_overlap(asked, configured={}, gradient_bytes=20 * MIB)
    assert settings == {"bucket_cap_mb": 3, "gradient_as_bucket_view": False, "static_graph": True}
    assert notes == []
    settings, _ = ddp_overlap(DDPOverlap(), configured={}, gradient_bytes=0)
    assert settings == {"gradient_as_bucket_view": True}


def test_what_the_strategy_was_given_stays() -> None:
    configured = {"bucket_cap_mb": 7, "gradient_as_bucket_view": False, "static_graph": True}
    assert ddp_overlap(DDPOverlap(), configured=configured, gradient_bytes=20 * MIB) == ({}, [])
    assert ddp_overlap(DDPOverlap(bucket_cap_mb=7), configured=configured, gradient_bytes=0) == ({}, [])


@pytest.mark.parametrize("name", ["bucket_cap_mb", "gradient_as_bucket_view", "static_graph"])
def test_two_values_for_one_argument_are_refused(name: str) -> None:
    values = {"bucket_cap_mb": (5, 6), "gradient_as_bucket_view": (True, False), "static_graph": (True, False)}[name]
    with pytest.raises(ConfigError, match=f"the strategy has {name}="):
        ddp_overlap(DDPOverlap(**{name: values[0]}), configured={name: values[1]}, gradient_bytes=0)


def test_gradients_are_accumulated_without_a_static_graph_only() -> None:
    with pytest.raises(ConfigError, match="accumulate_grad_batches=4"):
        ddp_overlap(DDPOverlap(static_graph=True), configured={}, gradient_bytes=0, accumulate=4)
    assert ddp_overlap(DDPOverlap(), configured={}, gradient_bytes=0, accumulate=4)[0]


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_bucket_of_nothing_is_refused(size: float) -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        ddp_overlap(DDPOverlap(bucket_cap_mb=size), configured={}, gradient_bytes=0)


def test_a_search_for_unused_parameters_that_a_static_graph_needs_not_is_said() -> None:
    configured = {"find_unused_parameters": True}
    _, (note,) = ddp_overlap(DDPOverlap(static_graph=True), configured=configured, gradient_bytes=0)
    assert "find_unused_parameters" in note
    assert ddp_overlap(DDPOverlap(), configured=configured, gradient_bytes=0)[1] == []
