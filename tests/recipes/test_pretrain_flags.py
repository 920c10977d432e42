"""The training script's flags: all are known, wrong combinations are refused with a sentence that says why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from recipes.pretrain.checks import BYTES_PER_PARAMETER, memory_problem, problems, settle
from recipes.pretrain.flags import make_parser, parse
from recipes.pretrain.models import CONFIGURATIONS, parameters_of
from resiliency.errors import ConfigError

#: The older library's table, and what its recipes add.
NUMBERS = {
    "num-nodes": 1,
    "num-gpus": 1,
    "max-runtime": None,
    "ckpt-threads-per-rank": 2,
    "max-steps": 1_000_000,
    "local-ckpt-interval": None,
    "persistent-ckpt-interval": None,
    "checkpoint-interval": None,
    "profile-ckpt-interval": None,
    "val-check-interval": None,
    "limit-val-batches": 10,
    "num-optimizer-replicas": None,
    "global-bs": None,
    "topk-ckpt": None,
    "micro-bs": 1,
    "seq-length": None,
    "seed": 1234,
}
TEXTS = {
    "tokenizer-path": None,
    "local-ckpt-dir": None,
    "persistent-ckpt-dir": None,
    "ckpt-dir": None,
    "log-dir": "log",
    "job-name": "test_job",
    "trace-name": None,
    "sim-fault-desc": "",
    "data": None,
    "accelerator": "auto",
}
ON_OFF = (
    "log-to-remote-storage",
    "enable-async-ckpt",
    "enable-optimized-async-ckpt",
    "enable-ckpt-load-replication",
    "enable-dist-ckpt",
    "enable-comm-overlap",
    "enable-gc",
    "enable-high-scale-ckpt",
    "enable-fault-tolerance",
    "enable-tensorboard",
    "enable-in-cluster-local-ckpt",
)


def value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag.replace("-", "_"))


@pytest.mark.parametrize("flag", NUMBERS)
def test_numbers(flag: str) -> None:
    assert value(parse([]), flag) == NUMBERS[flag]
    assert value(parse([f"--{flag}", "7"]), flag) == 7
    assert value(parse([f"--{flag}", "None"]), flag) is None
    with pytest.raises(SystemExit):
        parse([f"--{flag}", "seven"])


@pytest.mark.parametrize("flag", ["local-ckpt-interval", "persistent-ckpt-interval"])
def test_minus_one_is_unset(flag: str) -> None:
    assert value(parse([f"--{flag}=-1"]), flag) is None


@pytest.mark.parametrize("flag", TEXTS)
def test_texts(flag: str) -> None:
    assert value(parse([]), flag) == TEXTS[flag]
    assert value(parse([f"--{flag}", "x"]), flag) == "x"


@pytest.mark.parametrize("flag", ON_OFF)
def test_on_and_off(flag: str) -> None:
    assert value(parse([]), flag) is False
    assert value(parse([f"--{flag}"]), flag) is True
    assert value(parse([f"--{flag}", "--max-steps", "3"]), flag) is True
    assert value(parse([f"--{flag}=True"]), flag) is True
    assert value(parse([f"--{flag}", "false"]), flag) is False
    with pytest.raises(SystemExit):
        parse([f"--{flag}=maybe"])


def test_choices() -> None:
    for model in ("36M", "2B", "8B", "70B", "70Bt", "405B", "405Bt"):
        assert parse(["--model", model]).model == model
    assert parse([]).model == "36M"
    assert (parse([]).log_level, parse(["--log-level", "DEBUG"]).log_level) == ("INFO", "DEBUG")
    for wrong in (["--model", "7B"], ["--log-level", "LOUD"], ["--unknown"], ["--max-step", "3"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_no_flag_escapes_these_tests() -> None:
    known = {"help", "model", "log-level", *NUMBERS, *TEXTS, *ON_OFF}
    actions = make_parser()._actions
    assert {option.removeprefix("--") for action in actions for option in action.option_strings} - {"-h"} == known
    assert all(action.help for action in actions)


# -- combinations -------------------------------------------------------------------------------------------------------

CKPT = ["--ckpt-dir", "/c", "--checkpoint-interval", "10"]
TIERS = ["--local-ckpt-dir", "/l", "--local-ckpt-interval", "5", *CKPT]

GOOD = {
    "one tier": CKPT,
    "its other name": ["--persistent-ckpt-dir", "gs://b/c", "--persistent-ckpt-interval", "10"],
    "both names, equal": [*CKPT, "--persistent-ckpt-dir", "/c"],
    "local": ["--local-ckpt-dir", "/l", "--local-ckpt-interval", "5"],
    "both": TIERS,
    "a local tier without a name": [*CKPT, "--enable-in-cluster-local-ckpt"],
    "with an interval": [*CKPT, "--enable-in-cluster-local-ckpt", "--local-ckpt-interval", "5"],
    "profile": [*TIERS, "--profile-ckpt-interval", "15"],
    "batch": [*CKPT, "--num-gpus", "4", "--micro-bs", "2", "--global-bs", "16"],
    "replicas": [*CKPT, "--num-gpus", "4", "--num-optimizer-replicas", "2"],
    "overlap": [*CKPT, "--num-gpus", "2", "--enable-comm-overlap"],
    "everything that one rank can": [
        *TIERS,
        *(f"--{flag}" for flag in ON_OFF if flag.split("-")[1] not in ("comm", "high", "ckpt")),
        *("--topk-ckpt", "3", "--sim-fault-desc", "random,120", "--max-runtime", "60", "--trace-name", "t"),
    ],
}

WRONG: list[tuple[list[str], str]] = [
    ([], "no folder for checkpoints"),
    (["--ckpt-dir", "/c"], "would never be saved to"),
    (["--local-ckpt-dir", "/l"], "--local-ckpt-dir /l without --local-ckpt-interval"),
    ([*CKPT, "--local-ckpt-interval", "5"], "--local-ckpt-interval 5 without --local-ckpt-dir"),
    (["--checkpoint-interval", "5"], "--persistent-ckpt-interval 5 without"),
    (["--local-ckpt-dir", "gs://b", "--local-ckpt-interval", "5"], "is an address"),
    (["--local-ckpt-dir", "/c", "--local-ckpt-interval", "5", *CKPT], "cannot be both tiers"),
    (["--local-ckpt-dir", "/l", "--local-ckpt-interval", "20", *CKPT], "is less than --local-ckpt-interval 20"),
    (["--enable-in-cluster-local-ckpt"], "chooses the folder of the local tier by"),
    (["--local-ckpt-dir", "/l", "--local-ckpt-interval", "5", "--topk-ckpt", "3"], "--topk-ckpt counts"),
    ([*TIERS, "--enable-high-scale-ckpt"], "--local-ckpt-dir /local and no"),
    (["--local-ckpt-dir", "/local", "--local-ckpt-interval", "5", "--enable-high-scale-ckpt"], "needs what talks to"),
    ([*CKPT, "--enable-ckpt-load-replication"], "is about local checkpoints"),
    ([*TIERS, "--enable-ckpt-load-replication"], "one replica of the optimizer state"),
    ([*TIERS, "--num-gpus", "2", "--enable-ckpt-load-replication"], "transfer from rank to rank"),
    ([*CKPT, "--global-bs", "3", "--micro-bs", "2"], "no multiple of 1 ranks times --micro-bs 2"),
    ([*CKPT, "--num-gpus", "2", "--num-nodes", "2", "--global-bs", "6"], "no multiple of 4 ranks"),
    ([*CKPT, "--num-gpus", "4", "--num-optimizer-replicas", "3"], "does not divide 4 ranks"),
    ([*TIERS, "--num-gpus", "4", "--num-optimizer-replicas", "2"], "shards the state (FSDP2)"),
    (
        ["--ckpt-dir", "gs://b", "--checkpoint-interval", "5", "--num-gpus", "2", "--num-optimizer-replicas", "1"],
        "whose checkpoints are folders",
    ),
    ([*CKPT, "--enable-comm-overlap"], "one rank has no communication"),
    ([*TIERS, "--profile-ckpt-interval", "12"], "no multiple of 5"),
    ([*CKPT, "--log-dir", "gs://b"], "mount the bucket"),
    ([*CKPT, "--sim-fault-desc", "random"], "such as 'random,120'"),
    ([*CKPT, "--sim-fault-desc", "boom,3"], "rank_killed, rank_hung or random"),
    ([*CKPT, "--sim-fault-desc", "random,-3"], "such as 'random,120'"),
    ([*CKPT, "--tokenizer-path", "/nowhere/tokenizer.model"], "nothing of that name"),
    ([*CKPT, "--data", "/nowhere"], "nothing of that name"),
    ([*CKPT, "--limit-val-batches", "-2"], "pass 0 or more"),
    *(
        ([*CKPT, f"--{flag}", "0"], f"--{flag} 0: pass 1 or more")
        for flag in (
            "num-nodes",
            "num-gpus",
            "max-steps",
            "micro-bs",
            "ckpt-threads-per-rank",
            "max-runtime",
            "val-check-interval",
            "topk-ckpt",
            "profile-ckpt-interval",
            "num-optimizer-replicas",
            "global-bs",
            "seq-length",
        )
    ),
    ([*CKPT, "--max-steps", "None"], "--max-steps has no value"),
    *(([*CKPT, "--job-name", name], "--job-name") for name in ("", "None", "..", "a/b")),
    ([*CKPT, "--trace-name", "a/b"], "--trace-name 'a/b'"),
    ([*CKPT, "--accelerator", "cuda9"], "pass auto, cpu or gpu"),
    *(([*CKPT, "--seed", seed], f"--seed {seed}: pass") for seed in ("-5", "4294967296")),
    *(([*CKPT, "--log-dir", folder], "--log-dir has no value") for folder in ("", "None")),
    (["--ckpt-dir", "", "--checkpoint-interval", "5"], "--persistent-ckpt-dir has no value"),
    (["--local-ckpt-dir", "/c/", "--local-ckpt-interval", "5", *CKPT], "cannot be both tiers"),
    ([*CKPT, "--limit-val-batches", "10"], "without --val-check-interval: there is no validation"),
    (["--ckpt-dir", "foo://b", "--checkpoint-interval", "5"], "'foo://b' is no object store this library knows"),
    (["--ckpt-dir", f"{__file__}/ckpt", "--checkpoint-interval", "5"], f"{__file__} is a file"),
    (["--local-ckpt-dir", __file__, "--local-ckpt-interval", "5"], f"{__file__} is a file"),
    ([*CKPT, "--log-dir", __file__], f"{__file__} is a file"),
    ([*CKPT, "--data", __file__], "pass the folder"),
]


@pytest.mark.parametrize("name", GOOD)
def test_combinations_that_work(name: str) -> None:
    assert problems(settle(parse(GOOD[name]))) == []


@pytest.mark.parametrize(("arguments", "why"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_combinations_that_do_not_are_refused_with_the_reason(arguments: list[str], why: str) -> None:
    found = problems(settle(parse(arguments)))
    assert any(why in sentence for sentence in found), found


def test_a_launcher_with_another_number_of_ranks_is_refused() -> None:
    args = settle(parse([*CKPT, "--num-gpus", "2"]))
    assert problems(args, launched_ranks=2) == []
    assert "has started 3 ranks" in problems(args, launched_ranks=3)[0]


@pytest.mark.parametrize(
    "pair",
    [
        ["--ckpt-dir", "/a", "--persistent-ckpt-dir", "/b"],
        ["--checkpoint-interval", "1", "--persistent-ckpt-interval", "2"],
    ],
)
def test_an_alias_that_differs_is_refused(pair: list[str]) -> None:
    with pytest.raises(ConfigError, match="are the same flag"):
        settle(parse(pair))


def test_aliases_and_defaults_are_settled() -> None:
    args = settle(parse([*TIERS, "--num-nodes", "2", "--num-gpus", "4", "--micro-bs", "3"]))
    assert (args.persistent_ckpt_dir, args.persistent_ckpt_interval, args.save_interval) == ("/c", 10, 5)
    assert (args.ranks, args.global_bs, args.seq_length) == (8, 24, 128)
    assert settle(parse(["--seq-length", "64"])).seq_length == 64


# -- models -------------------------------------------------------------------------------------------------------------


def test_sizes_are_what_their_names_say() -> None:
    counts = {name: parameters_of(model) / 1e9 for name, model in CONFIGURATIONS.items()}
    expected = {"36M": 0.036, "2B": 2.0, "8B": 8.03, "70B": 70.6, "405B": 405.9}
    assert {name: counts[name] for name in expected} == pytest.approx(expected, rel=0.02)
    assert counts["70Bt"] < counts["70B"] / 10 and counts["405Bt"] < counts["405B"] / 10


@pytest.mark.parametrize("name", ["tiny", "36M"])
def test_the_count_is_that_of_the_module(name: str) -> None:
    from recipes.pretrain.model import GPT

    module = GPT(CONFIGURATIONS[name], steps=10)
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters_of(CONFIGURATIONS[name])


def test_a_model_that_does_not_fit_is_refused() -> None:
    args = settle(parse([*CKPT, "--model", "8B", "--num-gpus", "8"]))
    needed = parameters_of(CONFIGURATIONS["8B"]) * BYTES_PER_PARAMETER
    assert memory_problem(args, needed) == ""
    assert "a rank needs 120 GiB" in memory_problem(args, needed - 1)
    sharded = settle(parse([*CKPT, "--model", "8B", "--num-gpus", "8", "--num-optimizer-replicas", "2"]))
    assert memory_problem(sharded, needed // 4) == "" != memory_problem(sharded, needed // 4 - 1)


def test_data_is_tokens_of_a_text(tmp_path: Path) -> None:
    from recipes.pretrain.data import load_tokenizer, make_loaders

    (tmp_path / "a.txt").write_text("abcdefgh" * 20_000)
    train, val = make_loaders(load_tokenizer(None), folder=str(tmp_path), length=16, batch=3, val_windows=5)
    batch = next(iter(train))
    assert batch.shape == (3, 17) and set(batch.flatten().tolist()) <= set(b"abcdefgh")
    assert sum(len(each) for each in val) == 5
    assert len(train.dataset) >= 4096  # type: ignore[arg-type]
