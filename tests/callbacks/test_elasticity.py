"""A job that comes back at another size sees each sample of its epochs once: ranks are killed, and samples counted."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader

from resiliency.callbacks import elasticity
from resiliency.errors import ConfigError
from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import EITHER, NAMESPACES, loader, make_net, make_trainer
from tests.ports import free_port
from tests.rings import few

SAMPLES = 96


@dataclass
class Life:
    """One start of the job."""

    ranks: int
    die_at: list[int] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    batches: list[list[Any]] = field(default_factory=list)


def live(zygote: Zygote, folder: Path, lives: Sequence[Life], **arguments: Any) -> Counter[tuple[int, int]]:
    """Runs the lives one after the other. Returns how often (epoch, sample) was trained on in what counts: a life's
    steps that the next one has resumed from, and all of the last one's."""
    folder.mkdir(exist_ok=True)
    seen: Counter[tuple[int, int]] = Counter()
    for number, life in enumerate(lives):
        run(zygote, folder, life, number, {"samples": SAMPLES, "callback": {}, **arguments, **life.more})
        if number:
            resumed_at = life.starts[0]["step"]
            for before in lives[:number]:
                before.batches = [batch for batch in before.batches if batch[1] < resumed_at]
    for life in lives:
        for epoch, _, samples in life.batches:
            seen.update((epoch, sample) for sample in samples)
    return seen


def run(zygote: Zygote, folder: Path, life: Life, number: int, arguments: dict[str, Any]) -> None:
    notes, port = folder / f"life-{number}", str(free_port())
    workers = [
        zygote.start(
            "tests.callbacks.elastic_job:train",
            {"directory": str(folder / "ckpts"), "notes": str(notes), "die_at": life.die_at, **arguments},
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(life.ranks),
                "LOCAL_WORLD_SIZE": str(life.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NODE_RANK": "0",
                "GROUP_RANK": "0",
                "TORCHELASTIC_RUN_ID": "elastic",
                "TORCHELASTIC_RESTART_COUNT": str(number),
            },
        )
        for rank in range(life.ranks)
    ]
    deadline = time.monotonic() + 90
    try:
        codes = [worker.wait(timeout_s=max(0.1, deadline - time.monotonic())) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(code == 0 for code in codes) == (life.die_at is None), f"life {number} ended with {codes}"
    for rank in range(life.ranks):
        life.starts.append(json.loads(Path(f"{notes}.{rank}.start").read_text()))
        life.batches += [json.loads(line) for line in Path(f"{notes}.{rank}").read_text().splitlines()]
        end = Path(f"{notes}.{rank}.end")
        life.ends += [json.loads(end.read_text())] if end.exists() else []


def once(epochs: int = 2, samples: int = SAMPLES) -> Counter[tuple[int, int]]:
    return Counter((epoch, sample) for epoch in range(epochs) for sample in range(samples))


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "workers"),
    few([(True, 0), (False, 0), (True, 2)], [(True, 0)]),
    ids=["engine", "stock checkpoints", "loader workers"],
)
def test_each_sample_is_seen_once_by_four_two_and_three_ranks(
    zygote: Zygote, tmp_path: Path, engine: bool, workers: int
) -> None:
    # 12 batches of 8 samples; 5 of them. 56 samples are left: 14 batches of 4, 5 of them. 36: 6 of 6.
    lives = [Life(4, [0, 5]), Life(2, [0, 15]), Life(3)]
    lives[1].more = lives[2].more = {} if engine else {"ckpt_path": "last"}
    seen = live(zygote, tmp_path / "job", lives, engine=engine, workers=workers)
    assert [life.starts[0]["step"] for life in lives] == [0, 5, 10]
    assert seen == once()
    assert [life.starts[-1]["resized"] for life in lives] == [[], [[4, 2, 5]], [[2, 3, 10]]], "on every rank"
    assert lives[2].ends[0]["step"] == 5 + 5 + 6 + 16


@pytest.mark.nightly
def test_without_the_callback_samples_are_lost_and_repeated(zygote: Zygote, tmp_path: Path) -> None:
    """So the test above can fail. Of ``exact_epoch=False`` too."""
    for name, callback in (("none", None), ("off", {"exact_epoch": False})):
        seen = live(zygote, tmp_path / name, [Life(4, [0, 5]), Life(2)], callback=callback)
        assert seen != once() and max(seen.values()) > 1


@pytest.mark.parametrize("engine", few([True, False], [False]), ids=["engine", "stock checkpoints"])
def test_a_second_death_at_the_new_size_goes_on_in_what_was_left(zygote: Zygote, tmp_path: Path, engine: bool) -> None:
    """The engine then restores each rank's place in the rest, stock checkpoints do not."""
    lives = [Life(4, [0, 5]), Life(2, [0, 13]), Life(2)]
    lives[1].more = lives[2].more = {} if engine else {"ckpt_path": "last"}
    assert live(zygote, tmp_path / "job", lives, engine=engine) == once()
    assert [life.starts[0]["resized"] for life in lives] == [[], [[4, 2, 5]], []]


def test_samples_that_were_accumulated_and_not_stepped_on_are_seen_again(zygote: Zygote, tmp_path: Path) -> None:
    by_hand = str(tmp_path / "job/ckpts/by-hand.ckpt")
    # 5 batches are 2 steps and a half; 32 samples count. 16 batches of 4 are left.
    lives = [
        Life(4, [0, 6], {"save_at": [0, 5]}),
        Life(2, [0, 14], {"ckpt_path": by_hand, "save_at": [0, 13]}),
        Life(3, None, {"ckpt_path": by_hand}),
    ]
    assert live(zygote, tmp_path / "job", lives, accumulate=2) == once()
    assert [life.starts[0]["step"] for life in lives] == [0, 2, 4]


def test_a_callback_before_this_one_may_save(zygote: Zygote, tmp_path: Path) -> None:
    by_hand = str(tmp_path / "job/ckpts/by-hand.ckpt")
    lives = [Life(4, [0, 6], {"save_at": [0, 5], "saves_first": True}), Life(2, None, {"ckpt_path": by_hand})]
    assert live(zygote, tmp_path / "job", lives) == once()
    assert lives[1].starts[0]["step"] == 5


def test_the_global_batch_is_kept_by_accumulation(zygote: Zygote, tmp_path: Path) -> None:
    lives = [Life(4, [0, 5]), Life(2, [0, 16]), Life(4)]
    assert live(zygote, tmp_path / "job", lives, callback={"rule": "keep_global_batch"}) == once()
    assert [life.starts[0]["accumulate"] for life in lives] == [1, 2, 1]
    assert lives[2].ends[0]["step"] == 24, "as many optimizer steps as without a resize"
    for life in lives:
        sizes: Counter[tuple[int, int]] = Counter()
        for epoch, step, samples in life.batches:
            sizes[epoch, step] += len(samples)
        assert set(sizes.values()) == {8}, "samples of each optimizer step"


@pytest.mark.parametrize("shuffle", few([True, False], [True]))
def test_one_rank_has_the_order_of_several(zygote: Zygote, tmp_path: Path, shuffle: bool) -> None:
    lives = [Life(2, [0, 5]), Life(1, [0, 13]), Life(2)]
    assert live(zygote, tmp_path / "job", lives, shuffle=shuffle) == once()


@pytest.mark.parametrize("ranks", few([2, 6], [2]))
def test_a_death_at_the_end_of_an_epoch_begins_the_next_one(zygote: Zygote, tmp_path: Path, ranks: int) -> None:
    """The save is that of the last batch; the epoch has fewer or more batches at the other size."""
    lives = [Life(4, None, {"epochs": 1}), Life(ranks)]
    assert live(zygote, tmp_path / "job", lives) == once()


def test_a_save_at_the_last_batch_begins_the_next_epoch(zygote: Zygote, tmp_path: Path) -> None:
    """Worker processes then draw that epoch's indices before Lightning tells the sampler which one it is."""
    by_hand = str(tmp_path / "job/ckpts/by-hand.ckpt")
    lives = [Life(4, [1, 1], {"save_at": [0, 12]}), Life(2, [1, 6], {"ckpt_path": by_hand}), Life(3)]
    assert live(zygote, tmp_path / "job", lives, workers=1) == once()
    assert [life.starts[0]["step"] for life in lives] == [0, 12, 18]


def test_what_does_not_divide_is_filled_up_at_the_end_as_in_stock_lightning(zygote: Zygote, tmp_path: Path) -> None:
    lives = [Life(4, [0, 3]), Life(3)]
    seen = live(zygote, tmp_path / "job", lives, samples=50, epochs=1)
    assert set(seen) == set(once(1, 50)), "nobody is left out"
    assert sum(seen.values()) - 50 == 1, "26 samples are left: 9 for each of 3 ranks"


def test_incomplete_batches_are_left_out_where_the_loader_says_so(zygote: Zygote, tmp_path: Path) -> None:
    lives = [Life(4, [0, 3]), Life(2)]
    seen = live(zygote, tmp_path / "job", lives, samples=50, epochs=1, drop_last=True)
    assert max(seen.values()) == 1
    assert sum(seen.values()) == 24 + 24, "26 are left, 13 for each rank: 6 batches"


@pytest.mark.parametrize("namespace", EITHER)
def test_in_a_run_without_a_resize_it_changes_nothing(zygote: Zygote, tmp_path: Path, namespace: str) -> None:
    hashes = []
    for name, callback in (("with", {"rule": "linear_lr"}), ("without", None)):
        folder = tmp_path / name
        folder.mkdir()
        life = Life(2)
        run(zygote, folder, life, 0, {"samples": 50, "callback": callback, "namespace": namespace})
        hashes.append([end["hash"] for end in life.ends])
    assert hashes[0] == hashes[1] and len(hashes[0]) == 2


# -- in one process, with the number of ranks told -------------------------------------------------------------------


RESUMES = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


class Rates:
    """Starts of a job of one process that takes itself for one of several ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, namespace: str) -> None:
        self.monkeypatch, self.folder, self.namespace = monkeypatch, folder, namespace
        self.path = ""

    def start(self, size: int, steps: int, **arguments: Any) -> tuple[Any, Any]:
        """Trains up to ``steps`` and saves. Returns trainer and module, as they are at the end."""
        self.monkeypatch.setattr(elasticity, "data_parallel_ranks", lambda trainer: size)
        accumulate = arguments.pop("accumulate", 1)
        elastic = elasticity.build(self.namespace)(exact_epoch=False, **arguments)
        trainer = make_trainer(
            self.namespace,
            [elastic],
            root=self.folder,
            max_steps=steps,
            max_epochs=-1,
            accumulate_grad_batches=accumulate,
            enable_checkpointing=False,
        )
        net = make_net(self.namespace)
        trainer.fit(net, loader(), ckpt_path=self.path or None)
        self.path = str(self.folder / f"{steps}.ckpt")
        trainer.save_checkpoint(self.path)
        return trainer, net


@pytest.fixture(params=NAMESPACES)
def rates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rates:
    return Rates(monkeypatch, tmp_path, request.param)


def group(trainer: Any) -> tuple[float, float, list[float]]:
    [found] = trainer.optimizers[0].param_groups
    return found["lr"], found["initial_lr"], trainer.lr_scheduler_configs[0].scheduler.base_lrs


@RESUMES
@pytest.mark.parametrize(("rule", "factor"), [("linear_lr", 0.5), ("sqrt_lr", 0.5**0.5), (None, 1.0)])
def test_rates_follow_the_rule_and_come_back_exactly(rates: Rates, rule: str | None, factor: float) -> None:
    """The net has a StepLR that divides by ten after 3 and 6 steps."""
    first, _ = rates.start(4, 2, rule=rule)
    assert group(first) == (0.02, 0.02, [0.02])
    second, _ = rates.start(2, 5, rule=rule)
    assert group(second)[1:] == (0.02 * factor, [0.02 * factor])
    assert group(second)[0] == pytest.approx(0.002 * factor)
    third, _ = rates.start(4, 7, rule=rule)
    assert group(third)[1:] == (0.02, [0.02]), "to the last bit"
    assert group(third)[0] == pytest.approx(0.0002)


@RESUMES
def test_the_users_function_gets_the_sizes_when_all_is_restored(rates: Rates) -> None:
    calls: list[tuple[int, int, int, float]] = []

    def on_world_resize(old: int, new: int, trainer: Any) -> None:
        calls.append((old, new, trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]))

    for size, steps in ((4, 2), (4, 3), (2, 4), (3, 5)):
        rates.start(size, steps, on_world_resize=on_world_resize, rule="linear_lr")
    assert calls == [(4, 2, 3, 0.002 * 0.5), (2, 3, 4, pytest.approx(0.002 * 0.75))]


@RESUMES
def test_what_the_users_function_raises_ends_the_fit(rates: Rates) -> None:
    def refuse(old: int, new: int, trainer: Any) -> None:
        raise ValueError("two are too few")

    rates.start(4, 2, on_world_resize=refuse)
    with pytest.raises(ValueError, match="two are too few"):
        rates.start(2, 4, on_world_resize=refuse)


@RESUMES
def test_a_global_batch_that_cannot_be_kept_is_refused_or_taken_near(
    rates: Rates, caplog: pytest.LogCaptureFixture
) -> None:
    rule = {"rule": "keep_global_batch", "accumulate": 2}
    trainer, _ = rates.start(4, 2, **rule)
    assert trainer.accumulate_grad_batches == 2
    with pytest.raises(ConfigError, match="3 ranks cannot divide"):
        rates.start(3, 4, **rule)
    seen: list[int] = []
    rates.start(
        3,
        4,
        **rule,
        nearest=True,
        on_world_resize=lambda old, new, trainer: seen.append(trainer.accumulate_grad_batches),
    )
    assert seen == [3]
    assert "the global batch is now 9 rank batches, not 8: 3 ranks accumulate 3 batches" in caplog.text
    trainer, _ = rates.start(2, 6, rule="keep_global_batch", accumulate=1)
    assert trainer.accumulate_grad_batches == 1, "as the user gave it, once the fit is over"
    assert "accumulate_grad_batches=1 of the Trainer is not used: the job began with 2, on 4 ranks" in caplog.text


@RESUMES
def test_the_resize_is_said_in_one_line(rates: Rates, capsys: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rates.start(4, 2, rule="linear_lr")
        assert "World resized" not in caplog.text
        rates.start(2, 4, rule="linear_lr")
    said = caplog.text + capsys.readouterr().err
    assert "World resized: 4 -> 2 data parallel ranks. Learning rates are 0.5 times" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rule": "cubic"}, "rule='cubic'; pass one of 'keep_global_batch', 'linear_lr', 'sqrt_lr'"),
        ({"on_world_resize": 3}, "pass a function of"),
        ({"nearest": True}, "nearest=True is about rule='keep_global_batch'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        elasticity.build("lightning.pytorch")(**arguments)


def fit(callbacks: list[Any], folder: Path, train: Any = None, module: Any = None, **settings: Any) -> Any:
    trainer = make_trainer("lightning.pytorch", callbacks, root=folder, enable_checkpointing=False, **settings)
    trainer.fit(module or make_net("lightning.pytorch"), loader() if train is None else train)
    return trainer


def test_jobs_that_cannot_be_resized_are_refused_at_the_start(tmp_path: Path) -> None:
    make = elasticity.build("lightning.pytorch")
    for limit in (2, 1, 0.5):
        with pytest.raises(ConfigError, match=f"limit_train_batches={limit} .*exact_epoch=False"):
            fit([make()], tmp_path, limit_train_batches=limit)
    assert fit([make(exact_epoch=False)], tmp_path, limit_train_batches=2).global_step == 4
    with pytest.raises(ConfigError, match="there are 2 train loaders"):
        fit([make()], tmp_path, train=CombinedLoader([loader(), loader()], "min_size"))
    with pytest.raises(ConfigError, match="which manual optimisation does not use"):
        fit([make(rule="keep_global_batch")], tmp_path, module=make_net("lightning.pytorch", manual="wrapped"))
    with pytest.raises(ConfigError, match="both set accumulate_grad_batches"):
        fit([make(rule="keep_global_batch"), GradientAccumulationScheduler({2: 2})], tmp_path)
    with pytest.raises(ConfigError, match="the Trainer comes from"):
        elasticity.build("pytorch_lightning")().setup(SimpleNamespace(), None, "fit")


def test_the_loader_is_the_users_again_after_the_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = loader(shuffle=True)
    sampler = mine.sampler
    callback = elasticity.build("lightning.pytorch")()
    with caplog.at_level(logging.INFO):
        fit([callback], tmp_path, train=mine)
    assert mine.sampler is sampler
    assert "shuffled in the order of torch's DistributedSampler, from seed 0" in caplog.text
    assert callback.state_key == "ElasticityCallback"
    fresh = elasticity.build("lightning.pytorch")(rule="sqrt_lr")
    assert pickle.loads(pickle.dumps(fresh)).state_dict() == fresh.state_dict()


@RESUMES
def test_a_data_set_that_has_changed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = elasticity.build("lightning.pytorch")
    first = fit([make()], tmp_path, max_steps=3)
    first.save_checkpoint(tmp_path / "a.ckpt")
    trainer = make_trainer("lightning.pytorch", [make()], root=tmp_path, max_steps=4, enable_checkpointing=False)
    trainer.fit(make_net("lightning.pytorch"), loader(batches=9), ckpt_path=tmp_path / "a.ckpt")
    assert "had 18 samples at the save and has 27" in caplog.text


@RESUMES
@pytest.mark.parametrize("saves_at", [[6, 12], [6, 9, 11]], ids=["the next last batch", "twice in the epoch"])
def test_after_a_save_at_a_last_batch_later_ones_are_resumed_from_too(tmp_path: Path, saves_at: list[int]) -> None:
    """Lightning does not count the epoch that begins there, and so would begin it anew once more."""
    make, path = elasticity.build("lightning.pytorch"), None
    ran, started = 0, []
    for number, step in enumerate([*saves_at, None]):
        net = make_net("lightning.pytorch")
        trainer = make_trainer("lightning.pytorch", [make()], root=tmp_path, max_epochs=3, enable_checkpointing=False)

        def save_and_die(*_: Any, trainer: Any = trainer, step: int | None = step, number: int = number) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
                raise KeyError

        net.on_train_epoch_start = lambda trainer=trainer: started.append(trainer.current_epoch)
        net.on_train_batch_end = save_and_die
        with pytest.raises(KeyError) if step is not None else contextlib.nullcontext():
            trainer.fit(net, loader(), ckpt_path=path)
        ran, path = ran + net.ran, tmp_path / f"{number}.ckpt"
    assert (ran, trainer.global_step) == (18, 18)
    assert started == [0, 1, 2]


def test_after_a_finished_epoch_the_sampler_knows_the_next_one_before_workers_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(elasticity, "end_epoch", lambda trainer, batches: ended.append(batches))
    trainer: Any = SimpleNamespace(training=True)
    callback = elasticity.build("lightning.pytorch")()
    whole = {"samples": 18, "seed": 0, "shuffle": True, "begun_at": 0}
    state = callback.state_dict() | {"position": {"epoch": 3, "seen": 18, "finished": True, **whole}}
    callback.load_state_dict(state)
    callback._trainer = trainer
    mine = loader(shuffle=True)
    callback._prepare(trainer, mine)
    sampler: Any = mine.sampler
    assert sampler.epoch == 4 and ended == [6]


def test_a_state_of_a_newer_version_is_refused() -> None:
    callback = elasticity.build("lightning.pytorch")()
    with pytest.raises(ConfigError, match="version 2, this library reads up to 1"):
        callback.load_state_dict({"version": 2})
