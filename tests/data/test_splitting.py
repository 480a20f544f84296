"""Streams that split themselves: each rank reads its part only, and a run that is interrupted twice resumes exactly."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

import dalsegno as ds
from dalsegno.data import train_loader
from dalsegno.data.splitting import part_of_rank
from dalsegno.distributed import collectives
from dalsegno.testing import compare_runs, run_ranks
from support import layouts
from support.resumed import stop_after
from support.small import small_trainer

with contextlib.suppress(ImportError):  # before ranks are forked: in each of them it would take a second
    import datasets
    import scipy.io  # noqa: F401  # which datasets imports for its streams

LENGTH, STEPS = 23, 14
Sample = dict[str, Any]


def sample(index: int) -> Sample:
    x = torch.sin(torch.arange(8) * (index + 1.0))
    return {"x": x, "y": x.sum().reshape(1), "id": index}


class Parted(IterableDataset[Sample]):
    """Reads the samples of its part only, and notes each that it reads."""

    read: list[int] = []

    def __init__(self, first: int = 0, stride: int = 1) -> None:
        self.first, self.stride, self.at, self.epoch = first, stride, 0, 0

    def split_by_rank(self, rank: int, world_size: int) -> Any:
        return type(self)(rank, world_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        order = list(range(LENGTH))
        random.Random(self.epoch).shuffle(order)
        mine = order[self.first :: self.stride]
        while self.at < len(mine):
            self.at += 1
            self.read.append(mine[self.at - 1])
            yield sample(mine[self.at - 1])
        self.at = 0


class StatefulParted(Parted):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def hugging_face(folder: str, *, shuffled: bool, files: int = 4) -> Any:
    names = [Path(folder, f"{files}-{number}.jsonl") for number in range(files)]
    if collectives.rank() == 0 and not names[-1].exists():
        for number, name in enumerate(names):
            rows = [
                {key: getattr(each, "tolist", lambda each=each: each)() for key, each in sample(index).items()}
                for index in range(number, LENGTH, files)
            ]
            name.write_text("".join(json.dumps(row) + "\n" for row in rows))
    collectives.gather(None, "the files")
    data = datasets.load_dataset(
        "json", data_files=[*map(str, names)], split="train", streaming=True, cache_dir=f"{folder}/cache"
    ).with_format("torch")
    return data.shuffle(seed=3, buffer_size=7) if shuffled else data


def web_dataset(folder: str, splitter: Any = None) -> Any:
    wds = pytest.importorskip("webdataset")
    names = [Path(folder, f"part-{number}.tar") for number in range(4)]
    if collectives.rank() == 0 and not names[-1].exists():
        for number, name in enumerate(names):
            with wds.TarWriter(str(name)) as tar:
                for index in range(number, LENGTH, 4):
                    tar.write({"__key__": f"{index:04}", "id.json": json.dumps(index).encode()})
    collectives.gather(None, "the files")
    pipeline = wds.WebDataset([*map(str, names)], nodesplitter=splitter or wds.split_by_node, shardshuffle=False)
    return pipeline.compose(wds.detshuffle(5, 2, seed=1)).map(of_tar)


def of_tar(row: dict[str, Any]) -> Sample:
    return sample(json.loads(row["id.json"]))


KINDS: dict[str, dict[str, Callable[[str], Any]]] = {
    "none": {"with a state": lambda folder: StatefulParted(), "without a state": lambda folder: Parted()},
    "datasets": {
        "in order": lambda folder: hugging_face(folder, shuffled=False),
        "shuffled": lambda folder: hugging_face(folder, shuffled=True),
        "of files that the ranks do not divide": lambda folder: hugging_face(folder, shuffled=False, files=3),
    },
    "webdataset": {"shuffled": web_dataset},
}
"""Streams, by the library that they need; those of one are trained in the same processes."""


def legs(folder: str, library: str, *ends: tuple[str, int | None]) -> dict[str, list[list[list[int]]]]:
    """Legs of each kind of stream, each in an ``output_dir`` and until a step; what :func:`leg` returns of each."""
    return {
        kind: [leg(folder, f"{kind}/{output_dir}", build, stop) for output_dir, stop in ends]
        for kind, build in KINDS[library].items()
    }


def leg(folder: str, output_dir: str, build: Callable[[str], Any], stop: int | None) -> list[list[int]]:
    """The samples of each micro-batch of this leg."""
    seen: list[list[int]] = []

    def collate(samples: list[Sample]) -> Any:
        batch = default_collate([{key: each[key] for key in ("x", "y", "id")} for each in samples])
        seen.append(batch.pop("id").tolist())
        return batch

    Parted.read = []
    last = small_trainer(
        Path(folder, output_dir),
        *([] if stop is None else [stop_after(stop)]),
        parts={"train_dataset": build(folder), "data_collator": collate},
        per_device_train_batch_size=3,
        max_steps=STEPS,
        lr_scheduler_type="constant",
        save_steps=100,
    )
    last.train()
    if Parted.read:
        assert {*Parted.read} == {index for batch in seen for index in batch}  # no other rank's
    return seen


@pytest.mark.parametrize("library", KINDS)
def test_each_rank_reads_its_part_and_resumes_exactly(tmp_path: Path, library: str) -> None:
    if library != "none":
        pytest.importorskip(library)
    first = run_ranks(legs, 2, str(tmp_path), library, ("whole", None), ("parts", 2))
    for stop in (9, None):
        run_ranks(legs, 2, str(tmp_path), library, ("parts", stop))
    for kind in KINDS[library]:
        assert sorted(index for part in first for batch in part[kind][0][:4] for index in batch) == [*range(LENGTH)], (
            kind
        )
        comparison = compare_runs(tmp_path / kind / "whole", tmp_path / kind / "parts")
        assert comparison.identical, f"{kind}\n{comparison.table()}"


def with_a_state(folder: str, stop: int | None) -> None:
    leg(folder, "run", lambda _: StatefulParted(), stop)


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run_ranks(with_a_state, 2, str(tmp_path), 2)
    with pytest.raises(ds.StateMismatch, match="saved by 2 ranks, now there are 1, and only your loader or dataset"):
        with_a_state(str(tmp_path), None)


@pytest.mark.parametrize(
    ("library", "name", "loader"),
    [
        ("streaming.base.dataset", "StreamingDataset", "streaming.StreamingDataLoader"),
        ("litdata.streaming.dataset", "StreamingDataset", "litdata.StreamingDataLoader"),
        ("torchdata.nodes.base_node", "BaseNode", "torchdata.nodes.Loader"),
    ],
)
def test_a_stream_with_a_loader_of_its_own_names_it(library: str, name: str, loader: str) -> None:
    own = type("Own", (type(name, (Parted,), {"__module__": library}),), {})
    with pytest.raises(ds.ConfigurationError, match=rf"a Own of .* saves its position .*train_dataloader={loader}"):
        train_loader(own(), batch_size=1)


def test_a_split_for_other_ranks_is_refused() -> None:
    class Distributed:
        rank, world_size = 0, 4

    kind = type("IterableDataset", (), {"__module__": "datasets.iterable_dataset", "_distributed": Distributed})
    with pytest.raises(ds.ConfigurationError, match="is split for 4 ranks, and here 2 read different data"):
        part_of_rank(kind(), 0, 2)


def read_in_an_epoch(folder: str, layout: str, splitter: str) -> list[int]:
    """By this rank, of a webdataset whose ``nodesplitter`` is webdataset's own of that name."""
    wds = pytest.importorskip("webdataset")
    data, read = web_dataset(folder, getattr(wds, splitter)), []

    def collate(samples: list[Sample]) -> Any:
        read.extend(each["id"] for each in samples)
        return without_id(samples)

    small_trainer(
        Path(folder, "run"),
        model=layouts.Residual(),
        parts={"train_dataset": data, "data_collator": collate},
        parallel=layouts.mode(layout),
        max_steps=6 // layouts.LAYOUTS[layout][1],
    ).train()
    return read


@pytest.mark.parametrize(("layout", "splitter"), [("tp", "split_by_node"), ("tp x fsdp", "single_node_only")])
def test_ranks_that_share_data_read_the_same_part_of_a_webdataset(tmp_path: Path, layout: str, splitter: str) -> None:
    pytest.importorskip("webdataset")
    ranks, data_ranks = layouts.LAYOUTS[layout]
    read = run_ranks(read_in_an_epoch, ranks, str(tmp_path), layout, splitter)
    parts = {tuple(each) for each in read}
    assert len(parts) == data_ranks
    assert sorted(index for part in parts for index in part) == [*range(LENGTH)]


def test_a_nodesplitter_of_ones_own_is_refused_where_ranks_share_data(monkeypatch: pytest.MonkeyPatch) -> None:
    wds = pytest.importorskip("webdataset")
    data = wds.WebDataset(["part-0.tar"], nodesplitter=iter, shardshuffle=False)
    assert part_of_rank(data, 0, 1) is not None
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    with pytest.raises(ds.ConfigurationError, match="1 read different data; give it nodesplitter=webdataset"):
        part_of_rank(data, 0, 1)


def without_id(samples: list[Sample]) -> Any:
    return default_collate([{"x": each["x"], "y": each["y"]} for each in samples])
