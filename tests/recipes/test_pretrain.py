"""The training script: what each flag makes of the Trainer and its callbacks, and short runs."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import random
import signal
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.pretrain.checks import problems, settle
from recipes.pretrain.faults import Fault, FaultPlan, SimulatedFault
from recipes.pretrain.flags import parse
from resiliency.errors import ConfigError
from tests.callbacks.harness import content, names

OTHERS = {
    "resiliency.callbacks.logging": (
        "MemoryLoggingCallback",
        "StepLoggingCallback",
        "TPSLoggingCallback",
        "TensorboardCallback",
    ),
    "resiliency.callbacks.heartbeat": ("HeartbeatCallback",),
    "resiliency.callbacks.profile": ("ProfileCheckpointCallback",),
}
HAS_ALL = all(importlib.util.find_spec(name) is not None for name in OTHERS)


def double(name: str) -> type[Any]:
    """A callback that remembers its arguments."""
    from lightning.pytorch import Callback

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        self.given = (*arguments, *named.values())

    return type(name, (Callback,), {"__init__": init})


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The callbacks that watch are doubles, and temporary files go to the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for module, classes in OTHERS.items():
        made = ModuleType(module)
        for each in classes:
            setattr(made, each, double(each))
        monkeypatch.setitem(sys.modules, module, made)
    for name in ("recipes.pretrain.callbacks", "recipes.pretrain.train"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def settled(*arguments: str) -> argparse.Namespace:
    args = settle(parse(["--model", "tiny", "--accelerator", "cpu", *arguments]))
    assert problems(args) == []
    return args


def one_tier(tmp_path: Path) -> list[str]:
    return ["--ckpt-dir", str(tmp_path / "ck"), "--checkpoint-interval", "4", "--log-dir", str(tmp_path / "log")]


def trainer_of(*arguments: str) -> Any:
    from recipes.pretrain.train import make_trainer

    return make_trainer(settled(*arguments))


def callback_of(trainer: Any, name: str) -> Any:
    return next((one for one in trainer.callbacks if type(one).__name__ == name), None)


# -- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "flags", "ends", "kept"),
    [
        ((3, 6), ["--topk-ckpt", "2"], [12], {6, 12}),
        ((3, 6), ["--topk-ckpt", "2"], [14], {12, 14}),
        ((3, 6), ["--topk-ckpt", "2"], [14, 18], {12, 18}),
        ((3, 6), ["--topk-ckpt", "1", "--enable-optimized-async-ckpt"], [15], {15}),
        ((4, 6), ["--enable-async-ckpt"], [13], {6, 12, 13}),
        ((2, 2), ["--topk-ckpt", "2"], [5], {4, 5}),
    ],
)
def test_the_persistent_tier_holds_multiples_of_its_interval_and_the_last_save(
    every: tuple[int, int], flags: list[str], ends: list[int], kept: set[int], tmp_path: Path, quiet_logging: None
) -> None:
    """At most as many as wanted. Several ends: the job of the same name goes on."""
    local, persistent = tmp_path / "l" / "test_job" / "checkpoint", tmp_path / "p" / "test_job" / "checkpoint"
    where = ["--local-ckpt-dir", str(tmp_path / "l"), "--local-ckpt-interval", str(every[0])]
    where += ["--persistent-ckpt-dir", str(tmp_path / "p"), "--persistent-ckpt-interval", str(every[1])]
    for end in ends:
        run(*where, *flags, "--log-dir", str(tmp_path / "log"), "--max-steps", str(end))
    assert names(persistent) == {f"step={step}.ckpt" for step in kept}
    assert names(local) == {f"step={ends[-1]}.ckpt"}


def test_what_two_tiers_want_and_keep() -> None:
    from recipes.pretrain.checkpointing import TwoTiers

    two = TwoTiers(local_every=4, persistent_every=6, keep=2)
    assert [step for step in range(1, 19) if two.wants(step)] == [4, 6, 8, 12, 16, 18]
    assert two.outdated([6, 12, 16], ends=False) == []
    assert two.outdated([6, 12, 16], ends=True) == [6]
    assert two.outdated([6, 12, 16, 18], ends=False) == [6, 16]


def io_of(*arguments: str) -> Any:
    from recipes.pretrain.checkpointing import make_checkpoint_io

    return make_checkpoint_io(settled(*arguments))


LOCAL = ["--local-ckpt-dir", "/l", "--local-ckpt-interval", "5"]
PLUGINS: list[tuple[list[str], str, str]] = [
    (["--ckpt-dir", "/c", "--checkpoint-interval", "5"], "TieredCheckpointIO", ""),
    (["--ckpt-dir", "/c", "--checkpoint-interval", "5", "--enable-async-ckpt"], "MinCkptOverheadCheckpointIO", "async"),
    (
        ["--ckpt-dir", "/c", "--checkpoint-interval", "5", "--enable-optimized-async-ckpt"],
        "PersistentCheckpointProcessIO",
        "async",
    ),
    (LOCAL, "InClusterLocalCheckpointIO", ""),
    ([*LOCAL, "--enable-async-ckpt"], "InClusterLocalCheckpointIO", "async"),
    ([*LOCAL, "--enable-optimized-async-ckpt"], "PersistentCheckpointProcessIO", "async"),
]


@pytest.mark.parametrize(("arguments", "name", "mode"), PLUGINS)
def test_enable_dist_ckpt_chooses_a_plugin(arguments: list[str], name: str, mode: str) -> None:
    assert io_of(*arguments) is None
    plugin = io_of(*arguments, "--enable-dist-ckpt", "--ckpt-threads-per-rank", "3")
    assert type(plugin).__name__ == name and plugin._options.copy_threads == 3 and plugin._run == "test_job"
    known = getattr(plugin, "_arguments", {})
    assert known.get("async_save", False) is (mode == "async")
    assert known.get("local_ckpt_dir") == ("/l" if arguments[:4] == LOCAL else None)


# -- the Trainer --------------------------------------------------------------------------------------------------------


def test_trainer_flags(tmp_path: Path) -> None:
    trainer = trainer_of(
        *one_tier(tmp_path),
        *("--max-steps", "12", "--max-runtime", "90", "--micro-bs", "2", "--global-bs", "6"),
        *("--val-check-interval", "3", "--limit-val-batches", "2"),
    )
    assert trainer.max_steps == 12 and trainer.accumulate_grad_batches == 3
    assert callback_of(trainer, "Timer")._duration == timedelta(seconds=90).total_seconds()
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (9, None)
    assert trainer.limit_val_batches == 2
    plain = trainer_of(*one_tier(tmp_path))
    assert callback_of(plain, "Timer") is None and plain.limit_val_batches == 0
    assert type(plain.strategy).__name__ == "SingleDeviceStrategy"
    assert type(plain.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"
    plugged = trainer_of(*one_tier(tmp_path), "--enable-dist-ckpt")
    assert type(plugged.strategy.checkpoint_io).__name__ == "TieredCheckpointIO"


@pytest.mark.parametrize("kind", ["cpu", "gpu", "auto"])
def test_the_accelerator_is_passed_on(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.pretrain import train

    monkeypatch.setattr(train.pl, "Trainer", lambda **settings: settings)
    made: Any = train.make_trainer(settled(*one_tier(tmp_path), "--accelerator", kind))
    assert made["accelerator"] == kind


def test_ranks_and_replicas_choose_the_strategy(tmp_path: Path) -> None:
    ddp = trainer_of(*one_tier(tmp_path), "--num-gpus", "2", "--num-nodes", "2")
    assert (type(ddp.strategy).__name__, ddp.num_devices, ddp.num_nodes) == ("DDPStrategy", 2, 2)
    same = trainer_of(*one_tier(tmp_path), "--num-gpus", "2", "--num-optimizer-replicas", "2")
    assert type(same.strategy).__name__ == "DDPStrategy"
    sharded = trainer_of(*one_tier(tmp_path), "--num-gpus", "4", "--num-optimizer-replicas", "2")
    assert type(sharded.strategy).__name__ == "ModelParallelStrategy"
    assert sharded.strategy._data_parallel_size == 4


def test_a_sharded_job_resumes_from_the_newest_whole_folder(tmp_path: Path) -> None:
    from recipes.pretrain.train import resume_path

    sharded = settled(*one_tier(tmp_path), "--num-gpus", "2", "--num-optimizer-replicas", "1")
    assert resume_path(sharded) is None
    folder = tmp_path / "ck" / "test_job" / "checkpoint"
    for name, files in (("step=4.ckpt", (".metadata", "meta.pt")), ("step=8.ckpt", ("__0_0.distcp",))):
        (folder / name).mkdir(parents=True)
        for file in files:
            (folder / name / file).write_text("x")
    assert resume_path(sharded) == str(folder / "step=4.ckpt")
    assert resume_path(settled(*one_tier(tmp_path), "--num-gpus", "2")) is None


def test_what_is_always_there(tmp_path: Path) -> None:
    trainer = trainer_of(*one_tier(tmp_path), "--micro-bs", "4", "--seq-length", "16")
    assert callback_of(trainer, "AutoCheckpointCallback") and callback_of(trainer, "GoodputCallback")
    assert callback_of(trainer, "StepLoggingCallback").given == (None,)
    assert callback_of(trainer, "TPSLoggingCallback").given == (4, 16, None)
    assert callback_of(trainer, "MemoryLoggingCallback") is not None


SWITCHED: list[tuple[list[str], str, tuple[Any, ...] | None]] = [
    (["--enable-fault-tolerance"], "HeartbeatCallback", ()),
    (["--enable-gc"], "GarbageCollection", None),
    (["--trace-name", "all"], "RunTrace", None),
    (["--sim-fault-desc", "rank_killed,60"], "SimulatedFault", None),
    (["--num-gpus", "2", "--enable-comm-overlap"], "DDPCommOverlapCallback", None),
    (
        ["--num-gpus", "2", "--num-optimizer-replicas", "1", "--enable-comm-overlap"],
        "FSDP2CommOverlapCallback",
        None,
    ),
]


@pytest.mark.parametrize(("arguments", "name", "given"), SWITCHED, ids=[row[1] for row in SWITCHED])
def test_flags_that_add_a_callback(
    arguments: list[str], name: str, given: tuple[Any, ...] | None, tmp_path: Path
) -> None:
    assert callback_of(trainer_of(*one_tier(tmp_path)), name) is None
    found = callback_of(trainer_of(*one_tier(tmp_path), *arguments), name)
    assert found is not None
    if given is not None:
        assert found.given == given


def test_profiles_are_of_every_so_many_saves(tmp_path: Path) -> None:
    found = callback_of(trainer_of(*one_tier(tmp_path), "--profile-ckpt-interval", "12"), "ProfileCheckpointCallback")
    assert found.given == (str(tmp_path / "log" / "test_job" / "profile"), 3)


@pytest.mark.parametrize(("flag", "root"), [([], "tmp"), (["--log-to-remote-storage"], "log")])
def test_where_logs_go(flag: list[str], root: str, tmp_path: Path) -> None:
    trainer = trainer_of(*one_tier(tmp_path), "--enable-tensorboard", *flag)
    folder = tmp_path / root / "test_job" / "log"
    assert trainer.default_root_dir == str(folder)
    for name in ("TensorboardCallback", "StepLoggingCallback"):
        assert callback_of(trainer, name).given == (str(folder / "tensorboard"),)
    assert callback_of(trainer, "TPSLoggingCallback").given[2] == str(folder / "tensorboard")


def test_log_lines_are_in_a_file_of_each_rank(tmp_path: Path) -> None:
    from recipes.pretrain.logs import start_logging

    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    try:
        start_logging(settled(*one_tier(tmp_path), "--log-level", "ERROR"), 3)
        logging.getLogger("x").warning("quiet")
        logging.getLogger("x").error("loud")
    finally:
        for handler in root.handlers:
            if handler not in before[1]:
                handler.close()
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    text = (tmp_path / "tmp" / "test_job" / "log" / "rank-3.log").read_text()
    assert "loud" in text and "rank 3" in text and "quiet" not in text


# -- parts --------------------------------------------------------------------------------------------------------------


def test_garbage_is_collected_at_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.pretrain.callbacks import GarbageCollection

    callback, collected = GarbageCollection(every_n_steps=3), []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(trainer.global_step))
    trainer = SimpleNamespace(global_step=0)
    assert gc.isenabled()
    callback.on_train_start(trainer, None)
    assert not gc.isenabled()
    for trainer.global_step in (1, 2, 3, 3, 4, 5, 6, 7):
        callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_train_end(trainer, None)
    assert gc.isenabled() and collected == [0, 3, 6]


def test_a_fault_is_drawn_equally_on_every_rank() -> None:
    plan = FaultPlan.parse("random,0")
    drawn = {plan.draw(seed=f"job-{number}", ranks=4) for number in range(64)}
    assert drawn == {(fault, rank) for fault in Fault for rank in range(4)}
    assert plan.draw(seed="a", ranks=4) == plan.draw(seed="a", ranks=4)
    state = random.getstate()
    plan.draw(seed="a", ranks=4)
    assert random.getstate() == state, "the training's generator was used"
    assert {FaultPlan.parse("rank_hung,1.5").draw(seed=str(n), ranks=2)[0] for n in range(9)} == {Fault.rank_hung}
    for wrong in ("", "random", "random,x", "random,inf", "random,nan", "kill,1"):
        with pytest.raises(ConfigError):
            FaultPlan.parse(wrong)


def test_a_fault_hits_one_rank_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    done = threading.Event()

    def send(process: int, number: int) -> None:
        sent.append((process, number))
        done.set()

    callbacks = []
    for rank in range(3):
        callback = SimulatedFault(FaultPlan.parse("rank_killed,0.05"), job="job", send=send)
        callback.on_train_start(SimpleNamespace(world_size=3, global_rank=rank), None)
        callbacks.append(callback)
    assert done.wait(10)
    for callback in callbacks:
        callback.on_train_end(None, None)
    assert [number for _, number in sent] == [signal.SIGKILL]


def test_a_training_that_ends_first_is_not_hit() -> None:
    sent: list[int] = []
    callback = SimulatedFault(FaultPlan.parse("rank_killed,60"), job="job", send=lambda *args: sent.append(1))
    callback.on_train_start(SimpleNamespace(world_size=1, global_rank=0), None)
    callback.on_exception(None, None, RuntimeError())
    assert sent == [] and not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


@pytest.mark.parametrize("ending", ["model", "json"])
def test_tokenizers(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.pretrain.data import load_tokenizer

    path = str(tmp_path / f"tokenizer.{ending}")
    package = {"model": "sentencepiece", "json": "tokenizers"}[ending]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        load_tokenizer(path)
    made: Any = ModuleType(package)
    made.SentencePieceProcessor = lambda model_file: SimpleNamespace(
        vocab_size=lambda: 900, encode=lambda text: [len(model_file), *map(ord, text)]
    )
    made.Tokenizer = SimpleNamespace(
        from_file=lambda file: SimpleNamespace(
            get_vocab_size=lambda: 900, encode=lambda text: SimpleNamespace(ids=[len(file), *map(ord, text)])
        )
    )
    monkeypatch.setitem(sys.modules, package, made)
    tokenizer = load_tokenizer(path)
    assert tokenizer.size == 900 and tokenizer.encode(b"ab").tolist() == [len(path), 97, 98]


def test_another_kind_of_tokenizer_is_refused() -> None:
    from recipes.pretrain.data import load_tokenizer

    with pytest.raises(ConfigError, match=r"tokenizer\.model"):
        load_tokenizer("vocabulary.txt")


# -- runs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet_logging() -> Any:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    yield
    for handler in root.handlers:
        if handler not in before[1]:
            handler.close()
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def run(*arguments: str) -> Any:
    from recipes.pretrain.train import run as train

    return train(["--model", "tiny", "--accelerator", "cpu", *arguments])


def test_a_job_of_the_same_name_goes_on_and_saves_at_its_end(tmp_path: Path, quiet_logging: None) -> None:
    common = [*one_tier(tmp_path), "--enable-optimized-async-ckpt", "--enable-gc"]
    first = run(*common, "--max-steps", "6")
    folder = tmp_path / "ck" / "test_job" / "checkpoint"
    assert names(folder) == {"step=4.ckpt", "step=6.ckpt"}
    assert content(folder / "step=6.ckpt")["global_step"] == 6
    again = run(*common, "--max-steps", "9")
    assert (first.global_step, again.global_step) == (6, 9)
    assert names(folder) == {"step=4.ckpt", "step=6.ckpt", "step=8.ckpt", "step=9.ckpt"}
    text = (tmp_path / "tmp" / "test_job" / "log" / "rank-0.log").read_text()
    assert "trained to step 6" in text and "trained to step 9" in text


def test_seed_data_sequence_and_tokenizer_reach_the_model(
    tmp_path: Path, quiet_logging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = ModuleType("sentencepiece")
    made.SentencePieceProcessor = lambda model_file: SimpleNamespace(
        vocab_size=lambda: 300, encode=lambda text: [200 + byte % 100 for byte in text.encode()]
    )
    monkeypatch.setitem(sys.modules, "sentencepiece", made)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("abc" * 30_000)
    (tmp_path / "tokenizer.model").touch()
    seen: list[torch.Tensor] = []

    from recipes.pretrain import model as model_module

    real = model_module.GPT._loss
    monkeypatch.setattr(model_module.GPT, "_loss", lambda self, batch: seen.append(batch) or real(self, batch))
    flags = [
        *("--tokenizer-path", str(tmp_path / "tokenizer.model"), "--data", str(tmp_path / "data")),
        *("--seq-length", "20", "--micro-bs", "3", "--max-steps", "2"),
    ]
    weights = []
    for number, seed in enumerate(("1", "1", "2")):
        trainer = run(*one_tier(tmp_path), *flags, "--seed", seed, "--job-name", f"job{number}")
        assert trainer.lightning_module.embed.num_embeddings == 300
        weights.append(trainer.lightning_module.head.weight.detach().clone())
    assert seen[0].shape == (3, 21) and set(seen[0].flatten().tolist()) <= {297, 298, 299}
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_validation_runs_when_it_is_asked_for(tmp_path: Path, quiet_logging: None) -> None:
    flags = ["--max-steps", "6", "--val-check-interval", "2", "--limit-val-batches", "3", "--global-bs", "2"]
    trainer = run(*one_tier(tmp_path), *flags)
    assert "val_loss" in trainer.callback_metrics
    assert trainer.fit_loop.epoch_loop.val_loop._results is not None
    assert trainer.num_val_batches == [3]


def test_max_runtime_ends_with_a_checkpoint(tmp_path: Path, quiet_logging: None) -> None:
    arguments = ["--ckpt-dir", str(tmp_path / "ck"), "--checkpoint-interval", "1000000", "--log-dir", str(tmp_path)]
    trainer = run(*arguments, "--max-runtime", "2")
    assert 0 < trainer.global_step < 1_000_000
    assert names(tmp_path / "ck") == {f"test_job/checkpoint/step={trainer.global_step}.ckpt"}


def test_the_whole_run_is_traced(tmp_path: Path, quiet_logging: None) -> None:
    run(*one_tier(tmp_path), "--max-steps", "2", "--trace-name", "whole")
    trace = json.loads((tmp_path / "log" / "test_job" / "profile" / "whole-rank0.json").read_text())
    assert any("scaled_dot_product" in str(event.get("name")) for event in trace["traceEvents"])


def test_the_plugin_writes_what_the_trainer_saves(tmp_path: Path, quiet_logging: None) -> None:
    from resiliency.inspection.by_path import locate

    flags = [*one_tier(tmp_path), "--max-steps", "2", "--enable-dist-ckpt"]
    run(*flags)
    located = locate(str(tmp_path / "tmp" / "test_job" / "log" / "final.ckpt"))
    assert located is not None and located.id.step == 2


def test_wrong_flags_end_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--ckpt-dir", str(tmp_path / "ck"), "--enable-comm-overlap")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "would never be saved to" in said and "one rank has no communication" in said
    with pytest.raises(SystemExit):
        run("--model", "405B", *one_tier(tmp_path))
    assert "405.9 billion parameters" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            run("--accelerator", "gpu", *one_tier(tmp_path))
        assert "torch finds no GPU on this host" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_is_more_than_the_text_is_refused(tmp_path: Path, quiet_logging: None) -> None:
    """Lightning would train for no step, and the job would end well."""
    from resiliency.errors import ConfigError

    with pytest.raises(ConfigError, match="nothing to train on"):
        run(*one_tier(tmp_path), "--max-steps", "2", "--micro-bs", "10000000")


@pytest.mark.skipif(not HAS_ALL, reason="needs the callbacks that log, beat and profile")
def test_a_run_with_the_real_callbacks(
    tmp_path: Path, quiet_logging: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in OTHERS:
        monkeypatch.delitem(sys.modules, module)
    flags = ["--max-steps", "8", "--enable-tensorboard", "--enable-fault-tolerance", "--profile-ckpt-interval", "4"]
    run(*one_tier(tmp_path), *flags)
    text = (tmp_path / "tmp" / "test_job" / "log" / "rank-0.log").read_text()
    for line in ("Training starts.", "Step 2 time: ", "TPS for step 2: "):
        assert line in text
    assert list((tmp_path / "tmp" / "test_job" / "log" / "tensorboard").rglob("events.out.*"))
    assert list((tmp_path / "log" / "test_job" / "profile").glob("*.json"))
