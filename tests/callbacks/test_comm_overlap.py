"""Communication that overlaps computation: each argument reaches the thing it is for, and results are the same."""

from __future__ import annotations

import json
import logging
import pickle
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from resiliency.callbacks import _ddp_overlap, _fsdp2_overlap, comm_overlap
from resiliency.errors import ConfigError
from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import NAMESPACES, loader, make_net
from tests.ports import free_port

MIB = 1024 * 1024


def run(zygote: Zygote, folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    """What the two ranks wrote."""
    port, result = str(free_port()), folder / f"result-{time.monotonic_ns()}"
    workers = [
        zygote.start(
            "tests.callbacks.overlap_job:train",
            {"result": str(result), **arguments},
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NODE_RANK": "0",
                "GROUP_RANK": "0",
                "TORCHELASTIC_RUN_ID": "overlap",
            },
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + 60
    try:
        for worker in workers:
            worker.wait(timeout_s=max(0.1, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
    return [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def plain(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A training with DDP and without the callback."""
    first, second = run(zygote, tmp_path_factory.mktemp("plain"), strategy="ddp", callback=None)
    assert first["error"] == second["error"] == "" and first["weights"] == second["weights"]
    assert first["seen"] == {"bucket_bytes_cap": 25 * MIB, "gradient_as_bucket_view": False, "static_graph": False}
    return first


def test_ddp_decides_for_a_model_whose_layers_come_late(zygote: Zygote, tmp_path: Path, plain: dict[str, Any]) -> None:
    for answer in run(zygote, tmp_path, strategy="ddp", callback={}):
        assert answer["error"] == "" and answer["weights"] == plain["weights"]
        assert answer["seen"]["bucket_bytes_cap"] == MIB, "of 2.5 MiB of gradients"
        assert answer["seen"]["gradient_as_bucket_view"] is True and answer["seen"]["static_graph"] is False
        assert answer["left"] == [], "the strategy is as it was"


def test_ddp_takes_what_it_was_asked_for_in_each_fit(zygote: Zygote, tmp_path: Path) -> None:
    asked = {"bucket_cap_mb": 2, "gradient_as_bucket_view": False, "static_graph": True}
    for answer in run(zygote, tmp_path, strategy="ddp", callback=asked, fits=2):
        assert answer["error"] == ""
        assert answer["seen"] == {"bucket_bytes_cap": 2 * MIB, "gradient_as_bucket_view": False, "static_graph": True}


def test_ddp_refuses_a_static_graph_that_torch_cannot_accumulate(zygote: Zygote, tmp_path: Path) -> None:
    for answer in run(zygote, tmp_path, strategy="ddp", callback={"static_graph": True}, accumulate=2):
        assert answer["error"].startswith("ConfigError: static_graph=True and accumulate_grad_batches=2")


def test_ddp_refuses_a_strategy_that_was_given_another_value(zygote: Zygote, tmp_path: Path) -> None:
    for answer in run(zygote, tmp_path, strategy="ddp", callback={"bucket_cap_mb": 2}, bucket_cap_mb=9):
        assert answer["error"].startswith("ConfigError: the strategy has bucket_cap_mb=9")


@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 needs a GPU")
def test_fsdp2_gathers_as_many_layers_ahead_as_it_was_told(zygote: Zygote, tmp_path: Path) -> None:
    plain = run(zygote, tmp_path, strategy="fsdp2", callback=None)[0]
    assert plain["error"] == "" and plain["seen"] == {"forward": [[]] * 6, "backward": [[]] * 6}
    asked = {"forward_prefetch": 2, "backward_prefetch": 3}
    ahead = run(zygote, tmp_path, strategy="fsdp2", callback=asked)[0]
    assert ahead["error"] == "" and ahead["weights"] == plain["weights"]
    assert ahead["seen"]["forward"] == [[1, 2], [2, 3], [3, 4], [4, 5], [5], []]
    assert ahead["seen"]["backward"] == [[], [0], [1, 0], [2, 1, 0], [3, 2, 1], [4, 3, 2]]


# -- in one process ----------------------------------------------------------------------------------------------------


def trainer_of(namespace: str, callback: Any, **more: Any) -> Any:
    import importlib

    return importlib.import_module(namespace).Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("module", [_ddp_overlap, _fsdp2_overlap])
def test_one_process_trains_and_says_that_there_is_nothing_to_overlap(
    namespace: str, module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    callback = module.build(namespace)()
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
    with caplog.at_level(logging.INFO, logger="resiliency"):
        trainer = trainer_of(namespace, callback)
        trainer.fit(make_net(namespace), loader())
    assert trainer.global_step == 2
    assert "there is no communication to overlap" in caplog.text


@pytest.mark.parametrize("module", [comm_overlap, _ddp_overlap, _fsdp2_overlap])
def test_a_trainer_of_the_other_package_is_refused(module: ModuleType) -> None:
    callback = module.build("pytorch_lightning")()
    with pytest.raises(ConfigError, match="the Trainer comes from"):
        callback.setup(SimpleNamespace(), None, "fit")


def test_a_strategy_that_is_not_ddp_is_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ddp_overlap, "require_trainer_of", lambda *arguments: None)
    callback = _ddp_overlap.build("lightning.pytorch")()
    with pytest.raises(ConfigError, match="FSDP2CommOverlapCallback is for ModelParallelStrategy"):
        callback.setup(SimpleNamespace(strategy=SimpleNamespace(), world_size=2), None, "fit")


@pytest.mark.parametrize("arguments", [{"forward_prefetch": -1}, {"backward_prefetch": -1}, {"forward_prefetch": True}])
def test_fsdp2_refuses_what_is_no_number_of_layers(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        _fsdp2_overlap.build("lightning.pytorch")(**arguments)


def test_ddp_refuses_an_empty_bucket_at_once() -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        _ddp_overlap.build("lightning.pytorch")(bucket_cap_mb=0)


def test_what_is_not_sharded_is_refused_in_a_job_of_several_ranks() -> None:
    callback = _fsdp2_overlap.build("lightning.pytorch")()
    net = make_net("lightning.pytorch")
    with pytest.raises(ConfigError, match="no module sharded by fully_shard in Net"):
        callback.on_fit_start(SimpleNamespace(world_size=2), net)


# -- Megatron's strategy, as far as this callback sees it --------------------------------------------------------------


def megatron(**parallelism: Any) -> tuple[Any, Any]:
    """A trainer with 16 ranks, and its module."""
    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "sequence_parallel": True,
        **parallelism,
    }
    gradients = dict.fromkeys(
        ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size"), "as it was"
    )
    strategy = SimpleNamespace(
        parallelism=SimpleNamespace(**sizes), ddp_config=SimpleNamespace(use_distributed_optimizer=True, **gradients)
    )
    config = SimpleNamespace(
        tp_comm_overlap="as it was",
        overlap_p2p_comm="as it was",
        batch_p2p_comm="as it was",
        hidden_size=64,
        seq_length=32,
    )
    module = SimpleNamespace(config=config, optim=SimpleNamespace(config=SimpleNamespace(**gradients)))
    trainer = SimpleNamespace(
        strategy=strategy,
        world_size=16,
        global_rank=0,
        sanity_checking=True,
        datamodule=SimpleNamespace(micro_batch_size=4),
    )
    return trainer, module


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(comm_overlap, "require_trainer_of", lambda *arguments: None)
    return comm_overlap.build("lightning.pytorch")


def test_megatrons_configurations_are_set_before_they_are_used(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = megatron()
    with caplog.at_level(logging.INFO, logger="resiliency"):
        make(bucket_size=7).setup(trainer, module, "fit")
    assert (module.config.overlap_p2p_comm, module.config.batch_p2p_comm) == (True, False)
    assert module.config.tp_comm_overlap is False
    for config in (trainer.strategy.ddp_config, module.optim.config):
        assert (config.overlap_grad_reduce, config.overlap_param_gather) == (True, True)
        assert (config.align_param_gather, config.bucket_size) == (True, 7)
    assert "bucket_size=7" in caplog.text and "overlap_p2p_comm=True" in caplog.text
    assert not hasattr(trainer.strategy.ddp_config, "overlap_p2p_comm"), "of the model only"


def test_data_parallel_ranks_are_those_that_nothing_else_divides(make: Any) -> None:
    trainer, module = megatron(tensor_model_parallel_size=8, context_parallel_size=1)
    make().setup(trainer, module, "fit")
    assert trainer.strategy.ddp_config.overlap_grad_reduce is False, "16 ranks of 8 x 2: one replica"
    trainer, module = megatron(tensor_model_parallel_size=4, context_parallel_size=2)
    make().setup(trainer, module, "fit")
    assert trainer.strategy.ddp_config.overlap_grad_reduce is False


def test_another_optimizer_is_left_alone_and_that_is_said(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = megatron()
    trainer.strategy.ddp_config.use_distributed_optimizer = False
    make().setup(trainer, module, "fit")
    assert module.optim.config.overlap_grad_reduce == "as it was"
    assert "distributed optimizer is not used" in caplog.text


def test_megatrons_callback_refuses_other_strategies_and_modules(make: Any) -> None:
    trainer, module = megatron()
    with pytest.raises(ConfigError, match="has no Megatron configuration"):
        make().setup(trainer, SimpleNamespace(), "fit")
    trainer.strategy = SimpleNamespace()
    with pytest.raises(ConfigError, match="DDPCommOverlapCallback is for strategy='ddp'"):
        make().setup(trainer, module, "fit")


@pytest.mark.parametrize("hook", ["on_fit_start", "on_validation_start", "on_test_start", "on_predict_start"])
def test_transformer_engines_buffers_are_started_once_where_they_are_used(
    make: Any, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    name = "transformer_engine.pytorch.module.base"
    for each in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module", name):
        package = ModuleType(each)
        package.__spec__ = SimpleNamespace(name=each)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, each, package)
    sys.modules[name].initialize_ub = lambda **arguments: started.append(arguments)  # type: ignore[attr-defined]
    trainer, module = megatron(context_parallel_size=2)
    callback = make(tp_comm_overlap=True, tp_comm_overlap_cfg={"a": 1}, tp_comm_bootstrap_backend="gloo")
    callback.setup(trainer, module, "fit")
    assert module.config.tp_comm_overlap is True
    for _ in range(2):
        getattr(callback, hook)(trainer, module)
    assert started == [
        {"shape": [32 * 4 // 2, 64], "tp_size": 2, "use_fp8": False, "ub_cfgs": {"a": 1}, "bootstrap_backend": "gloo"}
    ]


def test_without_them_nothing_is_started_and_it_is_said(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = megatron()
    callback = make(tp_comm_overlap=True)
    callback.setup(trainer, module, "fit")
    callback.on_fit_start(trainer, module)
    assert module.config.tp_comm_overlap is False and "it is off" in caplog.text
