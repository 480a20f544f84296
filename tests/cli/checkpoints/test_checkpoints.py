"""``dalsegno checkpoints``: on the checkpoints of a real run, whole, damaged and half written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dalsegno.checkpoint import CheckpointManager, ModelState
from dalsegno.cli import main
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Component
from dalsegno.system.lock import DirectoryLock
from support.runs import busy_trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps; checkpoints of steps 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("run")
    busy_trainer(folder, max_steps=8).train()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


class Command:
    """Runs ``dalsegno checkpoints`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.errors = ""

    def __call__(self, *words: object, status: int = 0) -> str:
        self._capsys.readouterr()
        assert main(["checkpoints", *map(str, words)]) == status
        out, self.errors = self._capsys.readouterr()
        return out

    def json(self, *words: object, status: int = 0) -> Any:
        return json.loads(self(*words, "--json", status=status))


@pytest.fixture
def checkpoints(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def checkpoint_of(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08d}"


def flip_a_byte(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def picture(folder: Path) -> dict[str, Any]:
    """What would show that something was touched."""
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


# --- list -------------------------------------------------------------------------------------------------------------


def test_list_tells_of_each(trained: Path, checkpoints: Command) -> None:
    rows = checkpoints.json("list", trained)
    assert [(row["step"], row["ranks"], row["condition"]) for row in rows] == [
        (4, 1, "valid"),
        (6, 1, "valid"),
        (8, 1, "valid"),
    ]
    for row in rows:
        assert row["size"] == sum(
            path.stat().st_size for path in Path(row["path"]).rglob("*.*") if path.name != "manifest.json"
        )
        assert row["on_disk"] == row["size"]
        assert ("eval_loss" in row["metrics"]) is (row["step"] in (4, 8))
    header, *lines = checkpoints("list", trained).splitlines()
    assert header.split()[:7] == ["step", "saved", "size", "on", "disk", "ranks", "metrics"]
    assert ["eval_loss" in line for line in lines] == [True, False, True]
    assert not any("_per_second" in line for line in lines)


@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/step-00000006"])
def test_any_place_will_do(trained: Path, checkpoints: Command, place: str) -> None:
    steps = [row["step"] for row in checkpoints.json("list", trained / place)]
    assert steps == ([6] if "step" in place else [4, 6, 8])
    assert "problem" not in checkpoints("list", trained / place)


@pytest.mark.parametrize(("metric", "best"), [(None, 6), ("accuracy", 4)])
def test_the_best_listed_was_evaluated_best_of_those_on_disk(
    tmp_path: Path, checkpoints: Command, metric: str | None, best: int
) -> None:
    """The run's best evaluation, between steps 2 and 4, has no checkpoint; so no later manifest marks one."""

    class Settings:
        def state_dict(self) -> dict[str, Any]:
            return {"metric_for_best_model": metric}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    manager, settings = CheckpointManager(tmp_path), Component("settings", Settings())
    for step, loss, accuracy in ((2, 0.5, 0.1), (4, 0.3, 0.9), (6, 0.2, 0.8)):
        metrics = {"eval_loss": loss, "eval_accuracy": accuracy}
        manager.save(step, [ModelState(torch.nn.Linear(1, 1))], [settings], metrics=metrics, is_best=step == 2)
    assert [row["step"] for row in checkpoints.json("list", tmp_path) if row["best"]] == [best]


def test_a_folder_of_a_step_by_another_name_is_not_hidden(run: Path, checkpoints: Command) -> None:
    other = run / "checkpoints/step-0000000006"
    shutil.copytree(checkpoint_of(run, 6), other)
    checkpoints("list", run, status=2)
    refusal = f"{other}: the folder of step 6 is step-00000006; rename this one to that, or move it elsewhere"
    assert refusal in checkpoints.errors
    with pytest.raises(ConfigurationError) as raised:
        busy_trainer(run, max_steps=9).train()
    assert str(raised.value) == refusal
    other.rename(run / "elsewhere")
    assert [row["step"] for row in checkpoints.json("list", run)] == [4, 6, 8]


def test_list_marks_what_is_not_whole(run: Path, checkpoints: Command) -> None:
    (checkpoint_of(run, 4) / "shared.json").unlink()
    shutil.copytree(checkpoint_of(run, 6), checkpoint_of(run, 5).with_suffix(".damaged"))
    checkpoint_of(run, 9).with_suffix(".partial").mkdir()
    shutil.copytree(checkpoint_of(run, 6), checkpoint_of(run, 7))
    (run / "checkpoints/notes").mkdir()
    before = picture(run)
    rows = {Path(row["path"]).name: row for row in checkpoints.json("list", run, status=1)}
    assert {name: row["condition"] for name, row in rows.items()} == {
        "step-00000004": "damaged",
        "step-00000005.damaged": "quarantined",
        "step-00000006": "valid",
        "step-00000007": "damaged",
        "step-00000008": "valid",
        "step-00000009.partial": "partial",
    }
    assert rows["step-00000004"]["problem"] == "shared.json: No such file or directory"
    assert rows["step-00000007"]["problem"].endswith("its manifest is that of step 6")
    assert "shared.json: No such file" in checkpoints("list", run, status=1)
    assert picture(run) == before


def test_list_verifies_if_asked(run: Path, checkpoints: Command) -> None:
    assert [row["condition"] for row in checkpoints.json("list", run, "--verify")] == ["verified"] * 3
    flip_a_byte(checkpoint_of(run, 6) / "model/shard-00000.safetensors")
    assert [row["condition"] for row in checkpoints.json("list", run)] == ["valid"] * 3
    rows = checkpoints.json("list", run, "--verify", status=1)
    assert [row["condition"] for row in rows] == ["verified", "damaged", "verified"]
    assert "shard-00000.safetensors: has checksum" in rows[1]["problem"]


def test_nothing_to_list(tmp_path: Path, checkpoints: Command) -> None:
    checkpoints("list", tmp_path, status=2)
    assert checkpoints.errors == f"dalsegno: {tmp_path}: there is no checkpoint\n"
    checkpoints("list", tmp_path / "gone", status=2)
    assert checkpoints.errors == f"dalsegno: {tmp_path / 'gone'}: there is no such folder\n"


def test_looking_needs_no_torch(trained: Path) -> None:
    code = (
        "import sys\nfrom dalsegno.cli import main\n"
        "assert main(['checkpoints', *sys.argv[1:]]) == 0\nassert 'torch' not in sys.modules"
    )
    for command in ("list", "verify", "prune", "show"):
        done = subprocess.run([sys.executable, "-c", code, command, str(trained)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_finds_nothing_wrong(trained: Path, checkpoints: Command) -> None:
    rows = checkpoints.json("verify", trained)
    assert [(row["step"], row["verified"], row["problems"]) for row in rows] == [(s, True, []) for s in (4, 6, 8)]
    assert checkpoints("verify", trained).count("verified") == 3


def test_verify_names_file_and_reason(run: Path, checkpoints: Command) -> None:
    """Each file in turn, with the others whole; nothing is moved."""
    names = sorted(
        str(path.relative_to(checkpoint_of(run, 6))) for path in checkpoint_of(run, 6).rglob("*") if path.is_file()
    )
    assert len(names) > 5
    for name in names:
        path = checkpoint_of(run, 6) / name
        good = path.read_bytes()
        flip_a_byte(path, len(good) // 2)
        before = picture(run)
        rows = checkpoints.json("verify", run, status=1)
        assert [row["verified"] for row in rows] == [True, False, True], name
        (problem,) = rows[1]["problems"]
        assert name in problem and ("checksum" in problem or "not JSON" in problem)
        assert picture(run) == before
        path.write_bytes(good)
    assert checkpoints("verify", run, "--threads", 1).count("verified") == 3


def test_verify_says_all_that_is_wrong(run: Path, checkpoints: Command) -> None:
    flip_a_byte(checkpoint_of(run, 8) / "model/shard-00000.safetensors")
    (checkpoint_of(run, 8) / "index.json").unlink()
    out = checkpoints("verify", run, status=1)
    assert "DAMAGED" in out
    assert "model/shard-00000.safetensors: has checksum" in out
    assert "index.json: cannot be opened (No such file or directory)" in out


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_has_states_and_tensors(trained: Path, checkpoints: Command) -> None:
    shown = checkpoints.json("show", trained)
    assert (shown["step"], shown["ranks"]) == (8, 1)
    running = shown["components"]["callbacks.RunningLoss"]
    assert running["scope"] == "replicated"
    (state,) = running["states"]
    assert state["average"] == "tensor float32 []" and state["epochs_seen"] == [0]
    assert state["logged"]["train"] == [3, 6]
    tensors = {each["name"]: each for each in shown["tensors"]}
    weight = tensors["model.layers.0.weight"]
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("float32", [16, 8], 512)
    (piece,) = weight["pieces"]
    raw = (checkpoint_of(trained, 8) / piece["file"]).read_bytes()[slice(*piece["bytes"])]
    expected = load_file(checkpoint_of(trained, 8) / "model/shard-00000.safetensors")["layers.0.weight"]
    assert raw == expected.numpy().tobytes()


def test_show_one_component_on_a_page(trained: Path, checkpoints: Command) -> None:
    page = checkpoints("show", trained / "checkpoints/step-00000006", "--component", "callbacks.JsonLogger")
    assert '"path": "logs/train.jsonl"' in page
    assert "RunningLoss" not in page and "model." not in page
    long = checkpoints("show", trained, "--component", "rng")
    full = checkpoints("show", trained, "--component", "rng", "--full")
    assert " more" in long and " more" not in full and len(full) > len(long)
    checkpoints("show", trained, "--component", "callbacks.JsonLoger", status=2)
    assert "did you mean 'callbacks.JsonLogger'?" in checkpoints.errors


def test_show_leaves_out_what_is_missing_and_names_it(run: Path, checkpoints: Command) -> None:
    directory = checkpoint_of(run, 8)
    (directory / "model/shard-00000.safetensors").unlink()
    (directory / "rank-00000.json").write_text("{")
    shown = checkpoints.json("show", directory, status=1)
    of_rank, of_shard = shown["problems"]
    assert "rank-00000.json" in of_rank and "model/shard-00000.safetensors" in of_shard
    assert shown["components"]["rng"]["states"] == [None]
    assert shown["components"]["callbacks.RunningLoss"]["states"][0]["epochs_seen"] == [0]
    tensors = {each["name"]: each["bytes"] for each in shown["tensors"]}
    assert tensors["model.layers.0.weight"] is None and tensors["optimizer.layers.0.weight.exp_avg"] == 512
    page = checkpoints("show", directory, status=1)
    assert "model/shard-00000.safetensors:?" in page and "shard-00000.safetensors: cannot be opened" in page


class Anything:
    """A state of all kinds."""

    def state_dict(self) -> Any:
        return {
            "tuple": (1, 2),
            3: {"large": 1 << 70, "lost": float("nan"), "below": -float("inf")},
            "type": torch.bfloat16,
            "size": torch.Size([2]),
            "raw": b"abc",
        }

    def load_state_dict(self, state: Any) -> None: ...


def test_show_makes_any_state_readable(tmp_path: Path, checkpoints: Command) -> None:
    CheckpointManager(tmp_path).save(1, [], [Component("callbacks.Anything", Anything())])
    assert checkpoints.json("show", tmp_path)["components"]["callbacks.Anything"]["states"] == [
        {
            "tuple": [1, 2],
            "3": {"large": 1 << 70, "lost": "NaN", "below": "-Infinity"},
            "type": "bfloat16",
            "size": [2],
            "raw": "bytes YWJj",
        }
    ]


# --- diff -------------------------------------------------------------------------------------------------------------


def test_diff_of_the_same(trained: Path, checkpoints: Command) -> None:
    assert "Nothing differs." in checkpoints("diff", trained, checkpoint_of(trained, 8))


def test_diff_says_by_how_much(trained: Path, checkpoints: Command) -> None:
    found = checkpoints.json("diff", checkpoint_of(trained, 6), trained, status=1)
    name = "layers.0.weight"
    one, other = (
        load_file(checkpoint_of(trained, step) / "model/shard-00000.safetensors")[name].double() for step in (6, 8)
    )
    (row,) = [each for each in found["tensors"] if each["tensor"] == f"model.{name}"]
    assert row["elements"] == 128 and row["differing"] == int((one != other).sum())
    assert row["max_abs"] == float((one - other).abs().max())
    assert row["max_rel"] == float(((one - other).abs() / torch.maximum(one.abs(), other.abs())).max())
    states = {(each["component"], each["path"]): (each["first"], each["second"]) for each in found["states"]}
    assert states["trainer", "global_step"] == (6, 8)
    assert states["callbacks.JsonLogger", "records"] == (4, 5)
    assert not any(component == "callbacks.DivergenceDetector" for component, _ in states)
    only = checkpoints.json("diff", checkpoint_of(trained, 6), trained, "--tensors", status=1)
    assert only["states"] == [] and all(
        each["tensor"].split(".")[0] in ("model", "optimizer") for each in only["tensors"]
    )


class Two(torch.nn.Module):
    def __init__(self, values: list[float], dtype: torch.dtype = torch.float32, more: bool = False) -> None:
        super().__init__()
        self.register_buffer("values", torch.tensor(values, dtype=dtype))
        if more:
            self.register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Two([1.0, 2.0]), Two([1.0, 4.0]), {"differing": 1, "max_abs": 2.0, "max_rel": 0.5}),
        (Two([1.0, float("nan")]), Two([1.0, float("nan")]), None),
        (Two([1.0]), Two([float("nan")]), {"differing": 1, "max_abs": "Infinity", "max_rel": "Infinity"}),
        (Two([0.0]), Two([-0.0]), {"differing": 1, "max_abs": 0.0, "max_rel": 0.0}),
        (Two([1.0]), Two([1.0], torch.float16), {"differing": None, "first": "float32 [1]", "second": "float16 [1]"}),
        (Two([1.0]), Two([1.0, 2.0]), {"differing": None, "second": "float32 [2]"}),
        (Two([1.0]), Two([1.0], more=True), {"tensor": "model.more", "first": None, "second": "float32 [1]"}),
        (Two([1, 2], torch.int64), Two([1, 5], torch.int64), {"differing": 1, "max_abs": 3.0, "max_rel": 0.6}),
    ],
)
def test_diff_of_odd_tensors(tmp_path: Path, checkpoints: Command, one: Two, other: Two, expected: Any) -> None:
    for name, model in (("a", one), ("b", other)):
        CheckpointManager(tmp_path / name).save(1, [ModelState(model)], [])
    found = checkpoints.json("diff", tmp_path / "a", tmp_path / "b", status=0 if expected is None else 1)
    rows = [{key: row[key] for key in expected} for row in found["tensors"]]
    assert rows == ([expected] if expected else [])


def test_diff_of_what_is_damaged(run: Path, checkpoints: Command) -> None:
    flip_a_byte(checkpoint_of(run, 6) / "shared.json", 100)
    checkpoints("diff", checkpoint_of(run, 6), run, status=2)
    assert "shared.json: has checksum" in checkpoints.errors


# --- prune, and why a checkpoint is kept ----------------------------------------------------------------------------


def test_list_says_what_keeps_each(trained: Path, checkpoints: Command) -> None:
    best = "Best(metric='eval_loss', mode='min')"
    kept = {row["step"]: row["kept"] for row in checkpoints.json("list", trained)}
    assert kept == {4: ["Latest(count=3)"], 6: ["Latest(count=3)"], 8: ["Latest(count=3)", best, "newest"]}
    (row,) = checkpoints.json("list", checkpoint_of(trained, 6))
    assert row["kept"] == ["Latest(count=3)"]


def test_where_no_rule_is_set_all_stay(tmp_path: Path, checkpoints: Command) -> None:
    CheckpointManager(tmp_path).save(1, [], [])
    (row,) = checkpoints.json("list", tmp_path)
    assert row["kept"] == ["all stay"]
    checkpoints("prune", tmp_path, status=2)
    assert checkpoints.errors.endswith(
        "this run keeps every checkpoint; choose with --keep-latest, --keep-best or --every\n"
    )


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--keep-latest", "2"], [6, 8]),
        (["--keep-latest", "1", "--every", "4"], [4, 8]),
        (["--every", "6"], [6, 8]),
        (["--keep-best", "1", "--metric", "loss", "--mode", "max"], [4, 8]),
        ([], [4, 6, 8]),
    ],
)
def test_prune_deletes_what_no_rule_keeps(run: Path, checkpoints: Command, words: list[str], left: list[int]) -> None:
    before = picture(run)
    rows = checkpoints.json("prune", run, "--dry-run", *words)
    assert picture(run) == before
    assert [row["step"] for row in rows if row["kept"]] == left
    done = checkpoints.json("prune", run, *words)
    assert [row["step"] for row in done if not row["deleted"]] == left
    assert [row["step"] for row in checkpoints.json("list", run)] == left


def test_the_newest_that_verifies_is_never_pruned(run: Path, checkpoints: Command) -> None:
    flip_a_byte(checkpoint_of(run, 8) / "model/shard-00000.safetensors")
    out = checkpoints("prune", run, "--keep-latest", 1)
    assert [row["step"] for row in checkpoints.json("list", run)] == [6, 8]
    assert "newest that verifies" in out
    (deleted,) = [line for line in out.splitlines() if line.endswith("deleted")]
    assert out.splitlines()[-1] == f"{' '.join(deleted.split()[1:3])} freed"


def test_a_run_that_is_being_trained_is_left_alone(run: Path, checkpoints: Command) -> None:
    with DirectoryLock(run):
        checkpoints("prune", run, "--keep-latest", 1, status=2)
        assert "already in use" in checkpoints.errors
        assert "would be deleted" in checkpoints("prune", run, "--keep-latest", 1, "--dry-run")
    assert len(checkpoints.json("list", run)) == 3


def test_prune_leaves_what_is_not_ours(run: Path, checkpoints: Command) -> None:
    (checkpoint_of(run, 4) / "notes.txt").write_text("mine")
    assert "not deleted" in checkpoints("prune", run, "--keep-latest", 1)
    assert [row["step"] for row in checkpoints.json("list", run)] == [4, 8]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--keep-latest", "0"], "Latest(count=0): needs an integer of at least 1"),
        (["--metric", "loss"], "--metric and --mode define the best checkpoints: add --keep-best N"),
    ],
)
def test_what_cannot_be_kept(run: Path, checkpoints: Command, words: list[str], complaint: str) -> None:
    checkpoints("prune", run, *words, status=2)
    assert complaint in checkpoints.errors
    checkpoints("prune", checkpoint_of(run, 4), "--keep-latest", 1, status=2)
    assert "is a checkpoint; name the run" in checkpoints.errors


# --- export -----------------------------------------------------------------------------------------------------------


def test_export(trained: Path, tmp_path: Path, checkpoints: Command) -> None:
    done = checkpoints.json("export", checkpoint_of(trained, 6), "--to", tmp_path / "out", "--max-shard-size", "520B")
    assert [Path(path).name for path in done["files"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    page = checkpoints("export", trained, "--to", tmp_path / "whole")
    assert "4 tensors, 644 B" in page
    expected = load_file(checkpoint_of(trained, 8) / "model/shard-00000.safetensors")
    loaded = load_file(tmp_path / "whole/model.safetensors")
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in loaded)
    checkpoints("export", trained, "--to", tmp_path / "whole", status=2)
    assert "contains model.safetensors already" in checkpoints.errors


def test_the_nearest_command_is_named(checkpoints: Command) -> None:
    checkpoints("lst", status=2)
    assert checkpoints.errors == "dalsegno: unknown checkpoints command 'lst'; did you mean 'list'?\n"
