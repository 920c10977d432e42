"""docs/format.md is enough to read a checkpoint: nothing here imports this library.

The sample is a run "pretrain" of two ranks with replicated steps 10 and 20, a run "sharded" with a sharded step 10, and a
single file of a run of one rank.
"""

from __future__ import annotations

import collections
import io
import json
import math
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

SAMPLE = Path(os.environ.get("FORMAT_SAMPLE", Path(__file__).parent / "samples" / "format-5"))
FOLDER = re.compile(r"(\d{10,})-a(\d{4,})-([0-9a-f]{6})-(\d{2,})(?:-l(\d{4,}))?")
STEPS = [("pretrain", 10), ("pretrain", 20), ("sharded", 10)]
Id = tuple[int, int, str, int, int]


# -- the page in code: steps ------------------------------------------------------------------------------------------


def identity(fields: Mapping[str, Any]) -> Id:
    line = fields.get("line", fields["attempt"])
    return fields["step"], fields["attempt"], fields["token"], fields["serial"], line


def folders(run: str) -> dict[Id, Path]:
    """Step folders by identity, oldest first."""
    found = {}
    for path in (SAMPLE / ".resiliency" / run / "steps").iterdir():
        match = FOLDER.fullmatch(path.name)
        assert match is not None, path
        found[int(match[1]), int(match[2]), match[3], int(match[4]), int(match[5] or match[2])] = path
    return dict(sorted(found.items(), key=lambda item: [item[0][index] for index in (4, 0, 1, 3, 2)]))


def folder_of(run: str, step: int) -> Path:
    (found,) = [path for wanted, path in folders(run).items() if wanted[0] == step]
    return found


def shard_file(run: str, rank: int) -> str:
    return f"__{rank}_0.distcp" if run == "sharded" else f"shard-{rank:05d}.shard"


def read_record(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"shard-{rank:05d}.json").read_text())
    return found


def check(record: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in record.items() if name != "check"}
    return xxhash.xxh3_64_hexdigest(
        json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    )


def blocks_of(record: Mapping[str, Any]) -> list[tuple[int, int]]:
    edges = [0, *record["sections"], record["nbytes"]]
    return [
        (start, min(start + record["block_bytes"], end))
        for first, end in zip(edges, edges[1:], strict=False)
        for start in range(first, end, record["block_bytes"])
    ]


def merged_digests(records: list[dict[str, Any]], rank: int) -> list[str]:
    """The digests of a shard, with those that other ranks of its node wrote."""
    found = list(records[rank]["digests"])
    for other in records:
        if other["share"] is not None and other["node"] == records[rank]["node"] and "" in found:
            for index, digest in enumerate(other["share"]["digests"], other["share"]["first"]):
                found[index] = found[index] or digest
    return found


# -- the page in code: a shard file -----------------------------------------------------------------------------------


@dataclass
class Shard:
    identity: dict[str, Any]
    entries: dict[str, bytes]


def read_shard(data: bytes) -> Shard:
    """Entries by name, in file order, found by the rule for places."""
    entries: dict[str, bytes] = {}
    at = 0
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        listed = {info.header_offset: info for info in file.infolist()}
        end_of_entries = file.start_dir
    while at < end_of_entries:
        if at not in listed and "data.pkl" not in entries:
            assert data[at : at + 4] == b"PK\x03\x04", "the rest of the archive of one box"
            at = min(listed)
            assert at % 64 == 0
        elif at not in listed:
            assert data[at : at + 4] == b"PK\x01\x02", "the directory as it was before more was added"
            at = min(listed)
        info = listed.pop(at)
        assert info.compress_type == zipfile.ZIP_STORED and info.CRC == 0 and info.flag_bits == 0
        start = -(-(at + 30 + len(info.filename) + 4) // 64) * 64
        name_length, extra_length = struct.unpack("<HH", data[at + 26 : at + 30])
        assert start == at + 30 + name_length + extra_length, "the rule and the header disagree"
        assert info.filename.startswith("archive/")
        at = start + info.file_size
        entries[info.filename.removeprefix("archive/")] = data[start:at]
    assert not listed
    return Shard(json.loads(data[64:1024]), entries)


DTYPES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}


class StructureReader(pickle.Unpickler):
    """Reads a structure with nothing but what the page says of it.

    Args:
        storages: the bytes of each storage by key; those of a leaf are what stands for it.
    """

    def __init__(self, data: bytes, storages: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._storages = storages
        self._made: dict[Any, torch.Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        allowed = {("collections", "OrderedDict"): collections.OrderedDict, ("_codecs", "encode"): str.encode}
        return allowed[module, name]

    def persistent_load(self, reference: Any) -> Any:
        kind, dtype, key, location, elements = reference
        assert (kind, location) == ("storage", "cpu")
        return dtype, key, elements

    def _tensor(self, storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any) -> Any:
        dtype, key, elements = storage
        raw = self._storages[key]
        if not isinstance(raw, bytes):
            return raw  # the tensor of a leaf
        assert len(raw) == elements * dtype.itemsize and not requires_grad and not hooks
        if key not in self._made:
            self._made[key] = torch.frombuffer(bytearray(raw), dtype=dtype)
        return self._made[key].as_strided(size, stride, offset)


def storages_of(shard: Shard) -> dict[str, bytes]:
    return {name.removeprefix("data/"): data for name, data in shard.entries.items() if name.startswith("data/")}


def sharded_tensors(shards: list[Shard]) -> dict[str, torch.Tensor]:
    """The tensors of a sharded step, put together from boxes; every element must come exactly once."""
    tensors: dict[str, torch.Tensor] = {}
    filled: collections.Counter[str] = collections.Counter()
    for shard in shards:
        storages = storages_of(shard)
        chunks = json.loads(shard.entries["resiliency/chunks.json"])
        assert [chunk["storage"] for chunk in chunks] == list(storages)
        for chunk in chunks:
            dtype = getattr(torch, chunk["dtype"])
            assert dtype.itemsize == chunk["itemsize"]
            tensor = tensors.setdefault(chunk["key"], torch.empty(chunk["shape"], dtype=dtype))
            where = tuple(slice(a, a + n) for a, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
            tensor[where] = torch.frombuffer(bytearray(storages[chunk["storage"]]), dtype=dtype).reshape(chunk["sizes"])
            filled[chunk["key"]] += math.prod(chunk["sizes"])
    assert filled == {key: tensor.numel() for key, tensor in tensors.items()}
    return tensors


def shards_of(run: str, step: int) -> list[Shard]:
    folder = folder_of(run, step)
    return [read_shard((folder / shard_file(run, rank)).read_bytes()) for rank in range(2)]


# -- the sample by the page -------------------------------------------------------------------------------------------


def test_the_folders_spell_the_identities_and_order_them() -> None:
    assert [(step, attempt, serial, line) for step, attempt, _, serial, line in folders("pretrain")] == [
        (10, 1, 0, 1),
        (20, 1, 0, 1),
    ]
    assert (SAMPLE / ".resiliency" / "pretrain" / "attempt").read_text() == "1"


@pytest.mark.parametrize(("run", "step"), STEPS)
def test_the_manifest_lists_the_records_and_they_are_sound(run: str, step: int) -> None:
    folder = folder_of(run, step)
    wanted = next(known for known, path in folders(run).items() if path == folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["version"], identity(manifest), manifest["run"]) == (5, wanted, run)
    assert manifest["world_size"] == 2 and [record["rank"] for record in manifest["shards"]] == [0, 1]
    records = [read_record(folder, rank) for rank in range(2)]
    names = [f"step={step}.ckpt", "last.ckpt"] if run == "pretrain" else [f"sharded={step}.ckpt"]
    for rank, record in enumerate(records):
        assert record["check"] == check(record)
        assert (record["version"], identity(record), record["world_size"]) == (5, wanted, 2)
        assert record["names"] == names and record["info"] == {"epoch": step // 10}
        assert (record["exact"], record["tiers"], record["supersedes"]) == (step == 10, [], [])
        assert record["replicated"] == (run == "pretrain")
        listed = manifest["shards"][rank]
        assert listed["check"] == check(listed)
        whole = {**record, "digests": merged_digests(records, rank)}
        assert listed == {**whole, "check": check(whole)}
    assert len({record["plan"] for record in records}) == 1


@pytest.mark.parametrize(("run", "step"), STEPS)
def test_the_digests_cover_every_byte_of_every_shard(run: str, step: int) -> None:
    folder = folder_of(run, step)
    records = [read_record(folder, rank) for rank in range(2)]
    for rank, record in enumerate(records):
        data = (folder / shard_file(run, rank)).read_bytes()
        blocks = blocks_of(record)
        assert len(data) == record["nbytes"]
        assert b"".join(data[start:end] for start, end in blocks) == data
        assert [xxhash.xxh3_64_hexdigest(data[a:b]) for a, b in blocks] == merged_digests(records, rank)


@pytest.mark.parametrize("step", [10, 20])
def test_both_ranks_wrote_the_first_shard_of_a_replicated_step(step: int) -> None:
    """Or the sample would not show shares."""
    first, second = (read_record(folder_of("pretrain", step), rank) for rank in range(2))
    assert "" in first["digests"] and second["share"]["digests"]
    assert len(first["sections"]) == 2 and first["node"] == second["node"]


@pytest.mark.parametrize(("run", "step"), STEPS)
def test_the_first_1024_bytes_say_whose_a_shard_is(run: str, step: int) -> None:
    for rank, shard in enumerate(shards_of(run, step)):
        record = read_record(folder_of(run, step), rank)
        assert (shard.identity["format"], shard.identity["version"]) == ("resiliency-checkpoint", 5)
        assert identity(shard.identity) == identity(record)
        fields = ("run", "rank", "world_size", "replicated")
        assert [shard.identity[name] for name in fields] == [record[name] for name in fields]
        assert (
            next(iter(shard.entries)) == "resiliency/shard.json" and len(shard.entries["resiliency/shard.json"]) == 960
        )


@pytest.mark.parametrize(("run", "step"), STEPS)
def test_storages_come_first_and_what_describes_them_begins_at_the_last_section(run: str, step: int) -> None:
    for rank, shard in enumerate(shards_of(run, step)):
        order = [name.startswith("data/") for name in list(shard.entries)[1:]]
        assert order == sorted(order, reverse=True)
        record = read_record(folder_of(run, step), rank)
        storages = storages_of(shard)
        if storages:
            data = (folder_of(run, step) / shard_file(run, rank)).read_bytes()
            assert data[record["sections"][-1] :].startswith(b"PK\x03\x04")
            assert data[: record["sections"][-1]].endswith(list(storages.values())[-1])


def check_tree(tree: Any, step: int) -> None:
    weight = torch.arange(64, dtype=torch.float32).reshape(16, 4) + step
    model = tree["model"]
    assert torch.equal(model["weight"], weight) and model["tied"] is model["weight"]
    assert model["bias"].dtype is torch.bfloat16 and model["bias"].tolist() == [0.5, -1.5]
    assert model["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    moments = tree["optimizer"]["state"][0]
    assert torch.equal(moments["exp_avg"], weight * 2) and float(moments["step"]) == step
    assert tree["optimizer"]["lr"] == 0.1 and tree["epoch"] == step // 10
    assert tree["odd"]["a/b"].tolist() == [True, False] and tree["odd"]["c%d"].tolist() == [1 + 2j, -3j]
    assert tree["note"] == ("tuple", {1: "a key that is no text"}, b"\x00\xff", 1 << 80, "é")


@pytest.mark.parametrize("step", [10, 20])
def test_the_first_shard_of_a_replicated_step_holds_what_was_saved(step: int) -> None:
    first, second = shards_of("pretrain", step)
    tree = StructureReader(first.entries["data.pkl"], storages_of(first)).load()
    check_tree(tree, step)
    assert list(tree["model"]["transposed"].stride()) == [1, 3] and type(tree["model"]) is collections.OrderedDict
    assert storages_of(second) == {} and StructureReader(second.entries["data.pkl"], {}).load() == {}


def test_the_shards_of_a_sharded_step_hold_what_was_saved() -> None:
    shards = shards_of("sharded", 10)
    tensors = sharded_tensors(shards)
    line, _, pickled = shards[0].entries["resiliency/structure.pkl"].partition(b"\n")
    keys = json.loads(line)
    assert set(keys) == set(tensors) and "odd/a%2Fb" in keys and "odd/c%25d" in keys
    leaves = {f"leaf-{number}": tensors[key] for number, key in enumerate(keys)}
    check_tree(StructureReader(pickled, leaves).load(), 10)
    assert "resiliency/structure.pkl" not in shards[1].entries
    boxes = [chunk for shard in shards for chunk in json.loads(shard.entries["resiliency/chunks.json"])]
    assert any(chunk["sizes"] != chunk["shape"] for chunk in boxes), "or the sample would not show boxes"
    for shard in shards:
        flat = StructureReader(shard.entries["data.pkl"], storages_of(shard)).load()
        chunks = json.loads(shard.entries["resiliency/chunks.json"])
        assert list(flat) == [
            chunk["key"]
            if chunk["sizes"] == chunk["shape"]
            else f"{chunk['key']}@{','.join(map(str, chunk['offsets']))}"
            for chunk in chunks
        ]


@pytest.mark.parametrize(("run", "step"), STEPS)
def test_each_shard_has_what_its_rank_has_for_itself(run: str, step: int) -> None:
    for rank, shard in enumerate(shards_of(run, step)):
        own = torch.load(io.BytesIO(shard.entries["resiliency/rank.pt"]), weights_only=True)
        assert own["seed"] == 100 * step + rank and own["generator"].tolist() == [rank, step]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(("name", "step"), [("step=10.ckpt", 10), ("step=20.ckpt", 20), ("last.ckpt", 20)])
def test_a_name_is_the_first_shard_and_a_stock_checkpoint(name: str, step: int, mmap: bool) -> None:
    folder = folder_of("pretrain", step)
    assert (SAMPLE / name).read_bytes() == (folder / "shard-00000.shard").read_bytes()
    check_tree(torch.load(SAMPLE / name, mmap=mmap, weights_only=True), step)


def test_the_name_of_a_sharded_step_is_a_folder_with_its_shards_and_manifest() -> None:
    folder = folder_of("sharded", 10)
    files = sorted(path.name for path in (SAMPLE / "sharded=10.ckpt").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "meta.pt"]
    assert all((SAMPLE / "sharded=10.ckpt" / file).read_bytes() == (folder / file).read_bytes() for file in files)
    flat = torch.load(SAMPLE / "sharded=10.ckpt" / "__1_0.distcp", weights_only=True)
    assert torch.equal(flat["model/weight@10,0"], torch.arange(40.0, 64.0).reshape(6, 4) + 10)


def test_the_folder_of_a_sharded_step_is_a_stock_distributed_checkpoint() -> None:
    folder = folder_of("sharded", 10)
    first = shards_of("sharded", 10)[0]
    for file in (".metadata", "meta.pt"):
        assert (folder / file).read_bytes() == first.entries[f"resiliency/folder/{file}"]
    wanted = torch.arange(64.0).reshape(16, 4) + 10
    found = {
        "model": {"weight": torch.zeros(16, 4), "tied": torch.zeros(16, 4), "bias": torch.zeros(2).bfloat16()},
        "optimizer": {"state": {"0": {"exp_avg": torch.zeros(16, 4)}}, "lr": 0.0},
        "note": None,
    }
    torch.distributed.checkpoint.load(found, checkpoint_id=folder, no_dist=True)
    assert torch.equal(found["model"]["weight"], wanted) and torch.equal(found["model"]["tied"], wanted)
    assert torch.equal(found["model"]["bias"], torch.tensor([0.5, -1.5], dtype=torch.bfloat16))
    assert torch.equal(found["optimizer"]["state"]["0"]["exp_avg"], wanted * 2) and found["optimizer"]["lr"] == 0.1
    assert found["note"] == ("tuple", {1: "a key that is no text"}, b"\x00\xff", 1 << 80, "\u00e9")
    assert torch.load(folder / "meta.pt", weights_only=True) == {"epoch": 1}


def test_each_box_is_an_archive_of_one_tensor() -> None:
    folder = folder_of("sharded", 10)
    for rank in range(2):
        data = (folder / shard_file("sharded", rank)).read_bytes()
        chunks = json.loads(read_shard(data).entries["resiliency/chunks.json"])
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            listed = {info.filename: info.header_offset for info in file.infolist()}
        at = sorted(listed.values())
        for chunk in chunks:
            first = listed[f"archive/data/{chunk['storage']}"]
            alone = torch.load(io.BytesIO(data[first : at[at.index(first) + 1]]), weights_only=True)
            assert [*alone.shape] == chunk["sizes"] and str(alone.dtype) == f"torch.{chunk['dtype']}"


def test_a_step_of_one_rank_is_a_single_file_that_holds_its_record() -> None:
    data = (SAMPLE / "alone=10.ckpt").read_bytes()
    shard = read_shard(data)
    assert (shard.identity["run"], shard.identity["world_size"], shard.identity["replicated"]) == ("alone", 1, True)
    own = json.loads(shard.entries["resiliency/record.json"])
    record = own["record"]
    assert record["check"] == check(record) and identity(record) == identity(shard.identity)
    assert record["nbytes"] == len(data) and record["names"] == ["alone=10.ckpt"]
    tail = record["sections"][-1]
    for (start, end), digest in zip(blocks_of(record), record["digests"], strict=True):
        assert digest == (xxhash.xxh3_64_hexdigest(data[start:end]) if end <= tail else "")
    with zipfile.ZipFile(SAMPLE / "alone=10.ckpt") as file:
        at = file.getinfo("archive/resiliency/record.json").header_offset
    entry = data.index(shard.entries["resiliency/record.json"], at)
    rest = data[tail:entry] + data[entry + len(shard.entries["resiliency/record.json"]) :]
    assert own["rest"] == xxhash.xxh3_64_hexdigest(rest)
    check_tree(StructureReader(shard.entries["data.pkl"], storages_of(shard)).load(), 10)
    assert not (SAMPLE / ".resiliency" / "alone").exists()


def test_a_step_of_the_ranks_of_one_host_is_a_single_file_that_holds_their_shards_and_records() -> None:
    data = (SAMPLE / "together=10.ckpt").read_bytes()
    shard = read_shard(data)
    assert (shard.identity["run"], shard.identity["world_size"], shard.identity["rank"]) == ("together", 2, 0)
    own = json.loads(shard.entries["resiliency/record.json"])
    records = [own["record"], *own["others"]]
    assert [record["rank"] for record in records] == [0, 1]
    for record in records:
        assert record["check"] == check(record) and record["run"] == "together"
    tail = own["record"]["sections"][-1]
    assert own["record"]["nbytes"] == len(data)
    for (start, end), digest in zip(blocks_of(own["record"]), own["record"]["digests"], strict=True):
        assert digest == (xxhash.xxh3_64_hexdigest(data[start:end]) if end <= tail else "")
    with zipfile.ZipFile(SAMPLE / "together=10.ckpt") as file:
        at = file.getinfo("archive/resiliency/record.json").header_offset
    text = shard.entries["resiliency/record.json"]
    entry = data.index(text, at)
    assert own["rest"] == xxhash.xxh3_64_hexdigest(data[tail:entry] + data[entry + len(text) :])
    other = shard.entries["resiliency/shard-00001.shard"]
    for (start, end), digest in zip(blocks_of(records[1]), records[1]["digests"], strict=True):
        assert digest == xxhash.xxh3_64_hexdigest(other[start:end])
    for rank, one in enumerate((shard, read_shard(other))):
        assert one.identity["rank"] == rank
        state = torch.load(io.BytesIO(one.entries["resiliency/rank.pt"]), weights_only=True)
        assert state["seed"] == 1000 + rank
    check_tree(torch.load(SAMPLE / "together=10.ckpt", weights_only=True), 10)
    assert not (SAMPLE / ".resiliency" / "together").exists()


def test_this_reader_uses_nothing_of_the_library() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); import tests.storage.test_format\n"
    code += "print([name for name in sys.modules if name.split('.')[0] == 'resiliency'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def run(zygote: Any, code: str, output: Path, *arguments: str, **env: str) -> None:
    """In a process of its own, see above."""
    from tests.zygote import start_script

    worker = start_script(zygote, code, output, *arguments, env=env)
    try:
        assert worker.wait(timeout_s=300) == 0, output.read_text()
    finally:
        worker.kill()


@pytest.mark.skipif("FORMAT_SAMPLE" in os.environ, reason="one level of this is enough")
def test_what_the_library_writes_now_is_what_stands_on_the_page(zygote: Any, tmp_path: Path) -> None:
    """The tests of this file, on a new sample."""
    new = str(tmp_path / "new")
    make = "import runpy; runpy.run_module('tests.storage.samples.make_format_5', run_name='__main__')"
    run(zygote, make, tmp_path / "make.out", new)
    options = ["-q", "-p", "no:cacheprovider", "-k", "not library", str(Path(__file__))]
    run(
        zygote, "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", tmp_path / "out", *options, FORMAT_SAMPLE=new
    )


def test_the_library_reads_the_sample_too(zygote: Any, tmp_path: Path) -> None:
    """The other way round."""
    code = (
        "import shutil\n"
        f"shutil.copytree({str(SAMPLE)!r}, {str(tmp_path / 'copy')!r})\n"
        "from resiliency.testing.checkpoints import differences, make_checkpointer\n"
        "from tests.storage.samples.make_format_5 import per_rank, state\n"
        "for run, step in (('pretrain', 20), ('sharded', 10)):\n"
        f"    with make_checkpointer({str(tmp_path / 'copy')!r}, run=run) as checkpointer:\n"
        "        restored = checkpointer.load()\n"
        "    assert restored is not None and restored.step == step\n"
        "    wanted = state(step)\n"
        "    if run == 'sharded':\n"
        "        wanted['model'] = dict(wanted['model'])\n"
        "    assert differences(restored.state, wanted) == [], differences(restored.state, wanted)\n"
        "    assert differences(restored.per_rank, per_rank(step, 0)) == []\n"
    )
    run(zygote, code, tmp_path / "out")
