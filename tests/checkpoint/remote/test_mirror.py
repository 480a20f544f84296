"""A run at a URL, continued on other hosts. In memory, without latency."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import dalsegno as ds
from checkpoint.frozen import FROZEN, Part, content
from checkpoint.remote import jobs
from checkpoint.remote.there import steps_at, training
from checkpoint.sameness import assert_same
from dalsegno.checkpoint import Checkpoint, checkpoint_dir, saved_states
from dalsegno.checkpoint.listing import list_checkpoints, newest_verified
from dalsegno.checkpoint.remote import store_mirror, upload
from dalsegno.checkpoint.remote.download import fetch_newer
from dalsegno.checkpoint.remote.store import Store
from dalsegno.checkpoint.remote.upload import Uploader
from dalsegno.testing import compare_runs
from support.crash import Crash
from support.listeners import Listener

URL = "memory://runs/a"


@pytest.fixture(autouse=True)
def there() -> Iterator[Store]:
    """An empty store."""
    fsspec.filesystem("memory").store.clear()
    yield Store(URL)
    fsspec.filesystem("memory").store.clear()


def steps_of(folder: Path) -> list[int]:
    return [found.step for found in list_checkpoints(folder) if found.step is not None]


def test_the_store_has_the_same_checkpoints(there: Store, tmp_path: Path) -> None:
    jobs.train(URL, tmp_path, 6, save_total_limit=2)
    assert steps_of(tmp_path) == steps_at(there) == [4, 6]
    for name in there.sizes():
        assert there.read(name) == (tmp_path / name).read_bytes(), name
    here = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name in here - set(there.sizes()) if not name.startswith("witness/")} == {".lock"}


def test_a_new_host_fetches_both_and_ends_the_same(there: Store, tmp_path: Path) -> None:
    jobs.train(URL, tmp_path / "one", 6)
    second = jobs.train(URL, tmp_path / "two", 10)
    whole = jobs.train(tmp_path / "whole", None, 10)
    assert second["from"] == 6 and second["weights"] == whole["weights"]
    for name in ("train.jsonl", "array.json"):
        assert training(tmp_path / "two/logs" / name) == training(tmp_path / "whole/logs" / name)
    assert steps_of(tmp_path / "two") == [6, 8, 10] and steps_at(there) == [2, 4, 6, 8, 10]
    legs = json.loads(there.read("run.json") or b"")["legs"]
    assert [(leg["first_step"], leg["last_step"]) for leg in legs] == [(0, 6), (6, 10)]


def test_the_copy_here_is_preferred_if_it_is_as_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.train(URL, tmp_path, 4)
    monkeypatch.setattr(Store, "receive", None)
    assert jobs.train(URL, tmp_path, 6)["from"] == 4


def test_a_damaged_copy_here_is_brought_anew(tmp_path: Path) -> None:
    jobs.train(URL, tmp_path, 4)
    for step in (2, 4):
        (tmp_path / f"checkpoints/step-{step:08d}/index.json").write_text("{}")
    assert jobs.train(URL, tmp_path, 6)["from"] == 4
    assert newest_verified(tmp_path).step == 6


@pytest.mark.parametrize("name", ["model/shard-00000.safetensors", "shared.json", "manifest.json"])
def test_what_is_damaged_there_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    jobs.train(URL, tmp_path / "one", 4)
    path, system = f"/runs/a/checkpoints/step-00000004/{name}", fsspec.filesystem("memory")
    system.pipe_file(path, system.cat_file(path)[:-1] + b"?")
    assert jobs.train(URL, tmp_path / "two", 6)["from"] == 2
    assert "the checkpoint of step 4 is skipped" in caplog.text and name in caplog.text


def strict(local_dir: Path) -> int:
    """The step that ``train(strict=True)`` resumes from; it ends at once."""
    resumed = jobs.Resumed()
    jobs.trainer(URL, local_dir, 4, resumed).train(strict=True)
    return resumed.step


def test_strict_takes_the_copy_of_what_is_damaged_here(tmp_path: Path) -> None:
    jobs.train(URL, tmp_path, 4)
    newest = tmp_path / "checkpoints/step-00000004"
    (newest / "index.json").write_text("{}")
    assert strict(tmp_path) == 4
    newest.rename(newest.with_name("step-00000004.damaged"))
    (tmp_path / "checkpoints/step-00000002").rename(tmp_path / "elsewhere")
    assert strict(tmp_path) == 4  # nothing but what was renamed is left


def test_strict_takes_no_older_one_from_the_url(tmp_path: Path) -> None:
    jobs.train(URL, tmp_path / "one", 4)
    system = fsspec.filesystem("memory")
    name = "/runs/a/checkpoints/step-00000004/shared.json"
    system.pipe_file(name, system.cat_file(name)[:-1] + b"?")
    with pytest.raises(ds.DamagedCheckpoint, match=r"memory://runs/a: the checkpoint of step 4 is damaged"):
        strict(tmp_path / "two")
    system.rm("/runs/a/checkpoints/step-00000004", recursive=True)
    newest = tmp_path / "one/checkpoints/step-00000004"
    newest.rename(newest.with_name("step-00000004.damaged"))
    (tmp_path / "one/checkpoints/step-00000002").rename(tmp_path / "elsewhere")
    with pytest.raises(ds.DamagedCheckpoint, match=r"no checkpoint is left but step-00000004\.damaged"):
        strict(tmp_path / "one")


def test_strict_takes_the_copy_of_the_newest_that_no_earlier_leg_gave_up(tmp_path: Path) -> None:
    jobs.train(URL, tmp_path, 4)
    fsspec.filesystem("memory").rm("/runs/a/checkpoints/step-00000004", recursive=True)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-00000004").rename(checkpoints / "step-00000004.damaged")
    (checkpoints / "step-00000002/index.json").write_text("{}")
    assert strict(tmp_path) == 2


def test_when_another_host_has_gone_on_its_timeline_counts(tmp_path: Path) -> None:
    """The local checkpoint is newer but was never sent; another host has continued the run since."""
    jobs.train(URL, tmp_path / "one", 4)
    jobs.train(tmp_path / "one", None, 8)
    jobs.train(URL, tmp_path / "two", 6)
    assert jobs.train(URL, tmp_path / "one", 10)["from"] == 6
    assert steps_of(tmp_path / "one") == [2, 4, 6, 8, 10]
    attics = (tmp_path / "one/rewound").glob("timeline.*/checkpoints")
    assert {found.step for attic in attics for found in list_checkpoints(attic)} == {6, 8}
    jobs.train(tmp_path / "whole", None, 10)
    assert training(tmp_path / "one/logs/train.jsonl") == training(tmp_path / "whole/logs/train.jsonl")


def test_logs_go_up_to_where_they_were_at_the_checkpoint(tmp_path: Path) -> None:
    jobs.train(tmp_path, None, 6)
    checkpoint = Checkpoint.open(tmp_path / "checkpoints/step-00000004")
    taken, marks = upload.changed_run_files(tmp_path, {}, checkpoint)
    for name, key in (("logs/train.jsonl", "JsonLogger"), ("logs/array.json", "ArrayLogger")):
        (state,) = saved_states(checkpoint)[f"callbacks.{key}"]
        assert taken[name].read_bytes() == (tmp_path / name).read_bytes()[: state["offset"]]
        assert training(taken[name])[-1]["global_step"] == 4
    leg = json.loads(taken["run.json"].read_bytes())["legs"][0]
    assert (leg["last_step"], leg["ended"], leg["reason"], leg["metrics"]) == (6, None, None, {})
    assert [*upload.changed_run_files(tmp_path, marks, checkpoint)[0]] == ["run.json"]
    again, further = upload.changed_run_files(tmp_path, marks)
    assert [*again] == ["logs/array.json", "logs/train.jsonl", "run.json"], "what says that all is there is last"
    assert again["run.json"].read_bytes() == (tmp_path / "run.json").read_bytes()
    assert upload.changed_run_files(tmp_path, marks | further)[0] == {}


def test_a_file_that_is_replaced_within_the_resolution_of_the_clock_is_sent_again(tmp_path: Path) -> None:
    file, newer = tmp_path / "notes.json", tmp_path / "newer.json"
    file.write_text("[1]")
    _, marks = upload.changed_run_files(tmp_path, {})
    newer.write_text("[2]")
    os.utime(newer, ns=(0, file.stat().st_mtime_ns))
    newer.replace(file)
    sent, _ = upload.changed_run_files(tmp_path, marks)
    assert sent["notes.json"].read_text() == "[2]"


ENDS: dict[str, dict[str, Any] | None] = {
    "finished": None,
    "given up": {"final": True},
    "aborted": {"final": True, "save": False},
}


@pytest.mark.parametrize("end", ENDS)
def test_a_host_that_is_lost_before_it_has_sent_the_end(there: Store, tmp_path: Path, end: str) -> None:
    """Its uploads lag behind: with the last checkpoint, it sends files of a run that has ended already."""

    def trainer(output_dir: str | Path, local_dir: Path | None = None) -> ds.Trainer:
        def stop(ctx: Any) -> None:
            if ctx.step == 5 and (how := ENDS[end]) is not None:
                ctx.control.stop("enough", **how)

        return jobs.trainer(output_dir, local_dir, 6, Listener({"on_step_end": stop}, name="judge"))

    whole = trainer(tmp_path / "whole").train()
    trainer(tmp_path / "lost").train()
    Uploader(there, tmp_path / "lost", None).sync()
    for host in ("second", "third"):
        result = trainer(URL, tmp_path / host).train()
        assert (result.reason, result.global_step, result.why) == (whole.reason, whole.global_step, whole.why)
        comparison = compare_runs(tmp_path / "whole", tmp_path / host)
        assert comparison.identical, comparison.table()
    assert len(json.loads(there.read("run.json") or b"")["legs"]) == 2, "the third found all of it"


def test_the_journal_of_commands_travels_and_their_inbox_does_not(tmp_path: Path) -> None:
    """A request at the URL is not a command to the job that fetches the run."""
    for name in ("control.jsonl", "control/abort.json", "control/answers/abort.json", "logs/control/mine.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert upload.run_files(tmp_path) == ["control.jsonl", "logs/control/mine.json"]
    assert [name for name in ("control.jsonl", "control/abort.json") if upload.is_run_file(name)] == ["control.jsonl"]


def test_prunes_are_followed_also_of_what_other_hosts_have_sent(there: Store, tmp_path: Path) -> None:
    jobs.train(URL, tmp_path / "one", 6, save_total_limit=3)
    assert steps_at(there) == [2, 4, 6]
    jobs.train(URL, tmp_path / "two", 8, save_total_limit=2)
    assert steps_at(there) == [6, 8]
    assert not any("step-00000004" in name for name in there.sizes())


def test_a_prune_is_followed_before_the_next_checkpoint(
    there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a deletion that takes longer than the upload of the newer checkpoint."""
    changed, delete = changes_of(monkeypatch), checkpoint_dir.delete

    def delete_late(path: Path) -> bool:
        with changed:
            changed.wait_for(lambda: 4 in steps_at(there), timeout=0.5)
        return delete(path)

    def wait(ctx: Any) -> None:
        if ctx.step == 5:
            with changed:
                assert changed.wait_for(lambda: steps_at(there) == [4], timeout=60), steps_at(there)

    monkeypatch.setattr(checkpoint_dir, "delete", delete_late)
    jobs.trainer(URL, tmp_path, 6, Listener({"on_step_end": wait}), save_total_limit=1).train()


def changes_of(monkeypatch: pytest.MonkeyPatch) -> threading.Condition:
    """Notified after each change in any store."""
    changed = threading.Condition()

    def notifying(change: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            try:
                return change(*args)
            finally:
                with changed:
                    changed.notify_all()

        return act

    for name in ("write", "send", "delete", "move"):
        monkeypatch.setattr(Store, name, notifying(getattr(Store, name)))
    return changed


def test_going_back_and_starting_over_leave_a_timeline_there_too(there: Store, tmp_path: Path) -> None:
    jobs.train(URL, tmp_path / "one", 6)
    jobs.trainer(URL, tmp_path / "one", 6).train(tmp_path / "one/checkpoints/step-00000002")
    assert steps_at(there) == [2, 4, 6]
    first, names = "rewound/elsewhere.0001", set(there.sizes())
    assert {f"{first}/checkpoints/step-0000000{step}/manifest.json" for step in (4, 6)} <= names
    jobs.trainer(URL, tmp_path / "two", 2).train(False)
    assert steps_at(there) == [2]
    second, names = "rewound/elsewhere.0002", set(there.sizes())
    assert {f"{second}/run.json", f"{second}/logs/train.jsonl"} <= names
    assert sum(name.startswith(second) and name.endswith("manifest.json") for name in names) == 3


@pytest.mark.parametrize("step", [0, 2])
def test_a_choice_that_the_url_has_not_followed_yet_holds(
    there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The leg that starts over, or goes back, fails while the URL does not answer and has the abandoned timeline."""

    def fail(*_: object) -> None:
        raise OSError("no network")

    jobs.train(URL, tmp_path, 6)
    with monkeypatch.context() as outage:
        outage.setattr(Uploader, "archive_timeline", fail)
        outage.setattr(store_mirror, "PATIENCE", 0.01)
        with pytest.raises(RuntimeError, match="CUDA error"):
            jobs.trainer(URL, tmp_path, 6, Crash(step)).train(
                tmp_path / f"checkpoints/step-{step:08d}" if step else False
            )
    assert jobs.train(URL, tmp_path, 4)["from"] == step
    assert steps_at(there) == [2, 4]
    assert {name.split("/")[3] for name in there.sizes() if name.startswith("rewound/elsewhere.0001/checkpoints")} == {
        f"step-{each:08d}" for each in (2, 4, 6) if each > step
    }
    assert jobs.train(URL, tmp_path / "other host", 8)["from"] == 4


def test_a_second_train_of_the_same_trainer(there: Store, tmp_path: Path) -> None:
    mine = jobs.trainer(URL, tmp_path, 4)
    mine.train()
    mine.args.max_steps = 6
    mine.train()
    assert steps_at(there) == [2, 4, 6] and not any(name.startswith("rewound") for name in there.sizes())


def test_what_was_half_sent_is_removed_and_what_is_not_ours_is_not(there: Store, tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe_file("/runs/a/checkpoints/step-00000007/index.json", b"{}")
    system.pipe_file("/runs/a/checkpoints/mine/notes.txt", b"keep")
    jobs.train(URL, tmp_path, 4)
    assert steps_at(there) == [2, 4]
    assert there.read("checkpoints/step-00000007/index.json") is None
    assert there.read("checkpoints/mine/notes.txt") == b"keep"


def test_the_local_directory_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"local_dir='x': output_dir='.*' is not a URL"):
        ds.TrainingArguments(tmp_path, local_dir="x")
    with pytest.raises(ds.ConfigurationError, match=r"output_dir='nowhere://x': Protocol not known: nowhere"):
        jobs.trainer("nowhere://x", tmp_path, 2)
    with pytest.raises(ds.ConfigurationError, match=r"output_dir='s3:/bucket/run': pass a URL as str, not as Path"):
        ds.TrainingArguments(Path("s3://bucket/run"))
    monkeypatch.setenv("DALSEGNO_CACHE", str(tmp_path))
    first, second = (ds.TrainingArguments(f"s3://bucket/{name}/").directory for name in ("run 1", "run-1"))
    assert first != second and first.parent == second.parent == tmp_path
    assert first == ds.TrainingArguments("s3://bucket/run 1").directory


def test_an_unchanged_file_is_sent_once(there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later checkpoints get a copy that the store makes, and do not miss the first one."""
    sent: list[str] = []
    original = Store.send
    monkeypatch.setattr(
        Store, "send", lambda store, local, name, *rest: (sent.append(name), original(store, local, name, *rest))
    )
    part = Part(tmp_path / "here")
    uploader = Uploader(there, tmp_path / "here", None)
    uploader.archive_timeline(None)
    for step in (1, 2, 3):
        part.save(step)
        uploader.sync()
    assert [name for name in sent if name.endswith(FROZEN)] == [f"checkpoints/step-00000001/{FROZEN}"]
    there.delete(there.sizes("checkpoints/step-00000001"))
    there.delete(there.sizes("checkpoints/step-00000002"))
    assert fetch_newer(there, tmp_path / "new", None) == 3
    other = Part(tmp_path / "new", seed=1)
    other.load()
    assert_same(content(other), content(part))


def test_what_was_removed_there_is_sent_again(there: Store, tmp_path: Path) -> None:
    part = Part(tmp_path)
    uploader = Uploader(there, tmp_path, None)
    uploader.archive_timeline(None)
    for step in (1, 2):
        part.save(step)
        uploader.sync()
        there.delete([f"checkpoints/step-00000001/{FROZEN}"])
    assert f"checkpoints/step-00000002/{FROZEN}" in there.sizes()


def test_what_was_archived_travels_so_that_no_host_uses_its_place_again(there: Store, tmp_path: Path) -> None:
    def archived(name: str) -> bytes | None:
        return there.read(f"rewound/timeline.{name}/logs/train.jsonl")

    jobs.train(URL, tmp_path / "one", 4)
    jobs.trainer(URL, tmp_path / "one", 6).train(False)
    first = archived("0001")
    assert first is not None and first == (tmp_path / "one/rewound/timeline.0001/logs/train.jsonl").read_bytes()
    jobs.train(URL, tmp_path / "two", 8)
    assert (tmp_path / "two/rewound/timeline.0001/logs/train.jsonl").read_bytes() == first
    jobs.trainer(URL, tmp_path / "two", 2).train(False)
    assert archived("0001") == first and len(archived("0002") or b"") > len(first)


def test_a_host_that_starts_anew_gives_no_archive_the_name_of_another_hosts(there: Store, tmp_path: Path) -> None:
    name = "rewound/timeline.0001/logs/train.jsonl"
    jobs.train(URL, tmp_path / "one", 4)
    jobs.trainer(URL, tmp_path / "one", 6).train(False)
    archived = there.read(name)
    for steps in (8, 2):
        jobs.trainer(URL, tmp_path / "two", steps).train(False)
    assert archived is not None and there.read(name) == archived
    assert there.read(name.replace("0001", "0002")) == (tmp_path / "two" / name.replace("0001", "0002")).read_bytes()
