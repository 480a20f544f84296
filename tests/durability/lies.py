"""Checkpoints with a lie in them, and every checksum right: what loading one of them comes to. ``make lies``.

A real run is saved once. Each lie changes one thing in one of its files (a value, a type, a size, a key), or in
run.json, makes the manifest agree with it, and the run is gone on with, in a process that may end as it likes. What it
comes to is one of

* **refused**: DamagedCheckpoint or StateMismatch, before the first step, with the name of what is wrong; the model in
  memory is as it was;
* **refused late**: the same, after other states were loaded: what a user's own loader or callback does not take;
* **harmless**: the run goes on to its end;
* **raw**: any other error; **crashed**: the process is gone; **hung**.

The last three should never be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
import xxhash
from safetensors.torch import load, save

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.checkpoint.manifest import _checksum_of
from dalsegno.errors import DamagedCheckpoint, StateMismatch
from dalsegno.testing import DataOrder, TinyRegression, start_ranks, tiny_regression_data
from support.runs import RunningLoss

SAVED, LAST = 8, 11

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, -(2**31), 2**63, 2**64, 10**40, 0.5, -1e308, 1e999, "", "x", "0", "\x00",
    "../../etc/passwd", [], {}, [0], {"x": 0}, {"$float": "7ff8000000000000"}, {"$int": "0x" + "f" * 400},
    {"$tuple": [1, 2]}, {"$bytes": "AAAA"}, {"$device": "cuda:7"}, {"$dtype": "float16"}, {"$size": [2]},
    {"$array": "x", "dtype": "<f4", "shape": [1]}, {"$scalar": "<f8", "hex": "00" * 8}, {"$str": "7aCA"},
    [[[[]]]] * 3, "9" * 5000,
]  # fmt: skip


class OwnState(TypedDict):
    average: torch.Tensor
    epochs_seen: list[int]
    logged: dict[str, list[int]]


class OwnLoss(RunningLoss):
    """A callback of the user's own that says what its state looks like."""

    state_schema = OwnState

    def state_dict(self) -> Any:
        return super().state_dict()


def trainer(output_dir: Path, max_steps: int, data: str) -> ds.Trainer:
    """One of each kind of state: schedule, scaler-free, logs of both shapes, averages, a callback of the user's own."""
    torch.manual_seed(0)
    args = ds.TrainingArguments(
        output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        warmup_steps=3,
        logging_steps=3,
        eval_steps=4,
        save_steps=SAVED,
        load_best_model_at_end=True,
        use_cpu=True,
        disable_tqdm=True,
    )
    pairs = tiny_regression_data(20)
    source: dict[str, Any] = {"train_dataset": pairs}
    if data == "replayed":
        loader = torch.utils.data.DataLoader(pairs, batch_size=2, shuffle=True, generator=torch.Generator())
        source = {"train_dataloader": loader}
    elif data == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        source = {"train_dataloader": StatefulDataLoader(pairs, batch_size=2, shuffle=True)}
    listeners = [
        callbacks.JsonLogger(run="lies"),
        callbacks.JsonLogger(path="logs/array.json", name="ArrayLogger"),
        callbacks.GradNormLogger(),
        callbacks.ParameterNormLogger(),
        callbacks.ComputeBudget(),
        callbacks.DivergenceDetector(),
        callbacks.EarlyStopping(patience=100),
        callbacks.EMA(0.5),
        callbacks.ExpertLoadBalance(every=8, router=r"layers\.3$"),
        callbacks.GradientNoiseScale(),
        callbacks.LearningDynamics(),
        callbacks.ModelMerge(SAVED, window=3),
        callbacks.SkipSamples(0),
        callbacks.StabilityMonitor(),
        callbacks.TBLogger(),
        DataOrder(),
        OwnLoss(),
    ]
    return ds.Trainer(
        TinyRegression(), args, eval_dataset=tiny_regression_data(6, seed=1), callbacks=listeners, **source
    )


def first_leg(output_dir: Path, data: str) -> None:
    trainer(output_dir, SAVED, data).train()


@dataclass(frozen=True, slots=True)
class Lie:
    """What was changed, in words; by doing it again with the same dice it can be had again."""

    number: int
    data: str
    words: str


def tell(run: Path, dice: random.Random) -> str:
    """Change one thing in the run at ``run``, and let all checksums agree. What it was."""
    checkpoint = run / "checkpoints" / f"step-{SAVED:08d}"
    names = ["shared.json", "rank-00000.json", "index.json", "manifest.json", "arrays", "run.json"]
    name = dice.choices(names, weights=[45, 25, 12, 6, 10, 2])[0]
    if name == "arrays":
        words = in_tensors(dice.choice(sorted(checkpoint.rglob("*.safetensors"))), dice)
    elif name == "run.json":
        words = in_json(run / name, dice)
    else:
        words = in_json(checkpoint / name, dice)
    if name == "manifest.json":
        agree(checkpoint, only_itself=True)
    elif name != "run.json":
        agree(checkpoint)
    return f"{name}: {words}" if name != "arrays" else words


def in_json(path: Path, dice: random.Random) -> str:
    content = json.loads(path.read_bytes())
    places = list(within(content, ()))
    if path.name in ("shared.json", "rank-00000.json"):  # else the longest state would get all of them
        key = dice.choice(sorted(content["states"]))
        places = [place for place in places if place[:2] == ("states", key)] or places
    deep = dice.choice(range(max(map(len, places)) + 1))
    *path_to, last = dice.choice([place for place in places if len(place) >= deep] or places)
    holder = content
    for step in path_to:
        holder = holder[step]
    words = f"{'.'.join(map(str, [*path_to, last]))}: "
    ways: list[Callable[[], str]] = [lambda: replaced(holder, last, dice)] * 5
    ways += [lambda: dropped(holder, last), lambda: doubled(holder, last, dice), lambda: nudged(holder, last, dice)]
    words += dice.choice(ways)()
    path.write_text(json.dumps(content))
    return words


def within(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The path to every value in it."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from within(value, (*path, key))


def replaced(holder: Any, last: Any, dice: random.Random) -> str:
    holder[last] = dice.choice(ODD)
    return f"is {str(holder[last])[:60]}"


def dropped(holder: Any, last: Any) -> str:
    del holder[last]
    return "is dropped"


def doubled(holder: Any, last: Any, dice: random.Random) -> str:
    """One more beside it, under another key or at the end."""
    if isinstance(holder, list):
        holder.append(holder[last])
        return "is there once more, at the end"
    name = dice.choice(["x", "optimizer", "state_dict", "step", "load_state_dict", "__class__", "lr", "0", "$int"])
    holder[name] = holder[last]
    return f"is there once more, as {name}"


def nudged(holder: Any, last: Any, dice: random.Random) -> str:
    value = holder[last]
    if value is None or isinstance(value, bool | dict):
        return replaced(holder, last, dice)
    if isinstance(value, list):
        dice.shuffle(value)
        return "is shuffled"
    if isinstance(value, str):
        holder[last] = value[:-1] + dice.choice("0x\udcff")
    else:
        holder[last] = dice.choice([-value, value + 1, value * 2**40, value - 10**6])
    return f"is {holder[last]!r} for {value!r}"


def in_tensors(path: Path, dice: random.Random) -> str:
    """Another element type, another shape, one tensor less, or other bytes; the file stays one of safetensors."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    way = dice.choice(["bytes", "bytes", "cast", "drop", "reshape", "extreme"])
    if way == "bytes":
        changed = bytearray(data)
        for _ in range(dice.choice([1, 8, 64])):
            changed[dice.randrange(begin, len(data))] = dice.randrange(256)
        path.write_bytes(changed)
        return f"{path.name}: other bytes"
    tensors = load(data)
    name = dice.choice(sorted(tensors))
    if way == "drop":
        del tensors[name]
    elif way == "cast":
        tensors[name] = tensors[name].to(dice.choice([torch.int32, torch.float64, torch.bool, torch.uint8]))
    elif way == "reshape":
        tensors[name] = tensors[name].reshape(1, -1).contiguous()
    else:
        tensors[name].view(-1).view(torch.uint8).fill_(dice.choice([0, 255, 127]))
    path.write_bytes(save(tensors))
    return f"{path.name}: {name}: {way}"


def agree(checkpoint: Path, *, only_itself: bool = False) -> None:
    """Make the manifest say of every file what it is now, and of itself."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        return
    content.pop("xxh3", None)
    if not only_itself:
        for name in content["files"]:
            data = (checkpoint / name).read_bytes()
            content["files"][name] = {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    path.write_text(json.dumps(content | {"xxh3": _checksum_of(content)}))


def believe(run: Path, data: str) -> str:
    """Go on with the run. What it comes to: the kind, a colon, and what was said."""
    loaded: list[bool] = []
    try:
        there = trainer(run, LAST, data)
        there.add_callback(Began(loaded))
        before = {name: each.clone() for name, each in there.model.state_dict().items()}
        result = there.train()
    except (DamagedCheckpoint, StateMismatch) as error:
        if loaded:
            return f"late: {type(error).__name__}: {error}"
        same = all(torch.equal(each, before[name]) for name, each in there.model.state_dict().items())
        return f"{'refused' if same else 'refused late'}: {type(error).__name__}: {error}"
    except Exception as error:
        where = "training" if loaded else "loading"
        return f"raw: {type(error).__name__} in {where}: {str(error)[:300]}"
    return f"harmless: {result.reason} at {result.global_step}"


class Began(ds.Callback):
    name = "Began"

    def __init__(self, noted: list[bool]) -> None:
        self._noted = noted

    def on_step_begin(self, ctx: Any) -> None:
        self._noted.append(True)


def believe_many(folder: Path, data: str, numbers: list[int], seed: int) -> None:
    """In this process, one after the other. Each outcome is noted at once, whatever becomes of the process."""
    logging.getLogger("dalsegno").setLevel(logging.CRITICAL)
    os.fsync = lambda descriptor: None  # the machine stays on
    signal.signal(signal.SIGALRM, _too_long)
    for number in numbers:
        run = folder / f"run-{number}"
        shutil.copytree(folder / "true", run)
        lie = Lie(number, data, tell(run, random.Random(f"{seed}/{number}")))
        note(folder, lie, "crashed: the process was gone")
        signal.alarm(60)
        try:
            outcome = believe(run, data)
        except TimeoutError:
            outcome = "hung: for a minute"
        signal.alarm(0)
        note(folder, lie, outcome)
        shutil.rmtree(run)


def note(folder: Path, lie: Lie, outcome: str) -> None:
    with (folder / "outcomes.jsonl").open("a") as file:
        file.write(json.dumps([lie.number, lie.data, lie.words, outcome]) + "\n")


def noted(folder: Path) -> dict[int, tuple[Lie, str]]:
    """By number; what was noted last counts."""
    path = folder / "outcomes.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {number: (Lie(number, data, words), outcome) for number, data, words, outcome in lines}


def believe_truth(folder: Path, data: str) -> str:
    """The control: without a lie, the run goes on."""
    shutil.copytree(folder / "true", folder / "control")
    return believe(folder / "control", data)


def _too_long(*_: object) -> None:
    raise TimeoutError


def all_outcomes(count: int, seed: int, folder: Path) -> list[tuple[Lie, str]]:
    """Of so many lies, a third of them about each kind of data; a process that is gone takes one with it."""
    outcomes: list[tuple[Lie, str]] = []
    for share, data in enumerate(("map", "replayed", "stateful")):
        place = folder / data
        place.mkdir()
        (end,) = start_ranks(first_leg, 1, place / "true", data).wait()
        assert end.exit_code == 0, end.error
        assert start_ranks(believe_truth, 1, place, data).wait()[0].value == f"harmless: finished at {LAST}"
        wanted = range(share, count, 3)
        while left := [number for number in wanted if number not in noted(place)]:
            start_ranks(believe_many, 1, place, data, left[:50], seed).wait(timeout=3600)
            for run in place.glob("run-*"):  # of a process that is gone
                shutil.rmtree(run)
        outcomes += noted(place).values()
    return outcomes


def table(outcomes: list[tuple[Lie, str]]) -> str:
    kinds = Counter(outcome.partition(":")[0] for _, outcome in outcomes)
    return "\n".join(f"{kind:<22}{count:>8,}" for kind, count in kinds.most_common())


def is_good(outcome: str) -> bool:
    return outcome.partition(":")[0] in ("refused", "refused late", "harmless")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dalsegno-lies-") as folder:
        outcomes = all_outcomes(arguments.lies, arguments.seed, Path(folder))
    print(table(outcomes))
    bad = [(lie, outcome) for lie, outcome in outcomes if not is_good(outcome)]
    for lie, outcome in bad:
        print(f"\n{lie.number} ({lie.data}) {lie.words}\n    {outcome}")
    return 1 if bad else 0


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    sys.exit(main())
