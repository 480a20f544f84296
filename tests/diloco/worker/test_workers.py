"""Workers and a server together: equal to a plain computation, also if one of them was killed."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dalsegno as ds
from dalsegno.diloco import DiLoCoServer, DiLoCoWorker, WorkerOptions, delayed_nesterov, nesterov
from dalsegno.diloco.server.coordinator import Coordinator
from dalsegno.diloco.wire.messages import Result
from dalsegno.diloco.wire.signature import Specs
from dalsegno.diloco.worker.exchange import Exchange, Verdict
from dalsegno.errors import NotFound, NotRunning, StateMismatch
from dalsegno.logs import RunFile, drop_wall_clock, read_records
from dalsegno.testing import run_ranks, start_ranks
from diloco.scenes import (
    Line,
    all_together,
    local_step,
    plain_overlap,
    plain_rounds,
    rules,
    same,
    train_as_ranks,
    train_as_worker,
    train_by_hand,
)
from support.layouts import LAYOUTS


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.int8], ids=["fp32", "bf16", "int8"])
def test_rounds_over_http_equal_a_plain_computation(tmp_path: Path, workers: int, wire: torch.dtype) -> None:
    """Bitwise, whatever the order of arrival: the mean is weighted by samples, and added up by the workers' names."""
    with DiLoCoServer(tmp_path, workers, rules=rules(workers)) as server:
        models = all_together(
            [
                lambda number=number: train_by_hand(
                    server, number, 12, sync_every=4, bf16_comm=wire == torch.bfloat16, int8_comm=wire == torch.int8
                )
                for number in range(workers)
            ]
        )
    expected = plain_rounds(workers, 3, 4, nesterov(), wire)
    assert all(same(model, expected) for model in models)
    records = read_records(tmp_path / "logs/train.jsonl")
    assert [(each["global_step"], each["workers"]) for each in records] == [(1, workers), (2, workers), (3, workers)]


@pytest.mark.parametrize(
    "options",
    [{"int8_comm": True}, {"overlap_steps": 1, "num_fragments": 2}, {"overlap_steps": 3, "int8_comm": True}],
    ids=["int8", "overlapped", "overlapped-int8"],
)
def test_a_worker_continues_from_its_state(tmp_path: Path, options: dict[str, Any]) -> None:
    """A loop of one's own, killed between two synchronizations and continued in another process's place, ends with the
    parameters of one that was not killed."""

    def run(folder: Path, *, killed_after: int | None) -> Line:
        with DiLoCoServer(folder, 1, rules=rules(1)) as server:
            chosen = WorkerOptions(server.address, token=server.token, worker_id="w", sync_every=4, **options)
            model, optimizer = Line(seed=0), None
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            worker = DiLoCoWorker(model, chosen, optimizer=optimizer)
            worker.__enter__()
            for step in range(16):  # 4 synchronizations
                local_step(model, optimizer, 0, step)
                if step == killed_after:
                    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), worker.state_dict()])
                    for later in range(step + 1, step + 6):  # what the kill takes away
                        local_step(model, optimizer, 0, later)
                    model = Line(seed=1)
                    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                    worker = DiLoCoWorker(model, chosen, optimizer=optimizer)
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                    worker.load_state_dict(saved[2])
                    worker.__enter__()
            worker.__exit__(None, None, None)
        return model

    whole = run(tmp_path / "whole", killed_after=None)
    assert same(run(tmp_path / "parts", killed_after=6), whole)
    assert same(run(tmp_path / "in-flight", killed_after=7), whole)  # a submission is on its way, if they may be


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Line]:
    """A run that has trained alone, and its model."""
    model, folder = Line(seed=3), tmp_path_factory.mktemp("alone") / "run"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(4, 8, 6), batch_size=None)
    args = ds.TrainingArguments(folder, max_steps=4, save_steps=2)
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader) as run:
        for x in run.batches():
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder, model


@pytest.mark.parametrize("part", ["", "checkpoints/step-00000004", "model.safetensors"])
def test_a_server_begins_with_saved_weights(tmp_path: Path, trained: tuple[Path, Line], part: str) -> None:
    """Every worker gets them, the first one too; a server that continues does not look for them again."""
    folder, model = trained
    with DiLoCoServer(tmp_path, 2, rules=rules(2), from_checkpoint=folder / part) as server:
        workers = all_together([lambda number=number: train_by_hand(server, number, 0) for number in range(2)])
    assert all(same(worker, model) for worker in workers)
    with DiLoCoServer(tmp_path, 2, rules=rules(2), from_checkpoint=tmp_path / "gone") as server:
        assert same(train_by_hand(server, 2, 0), model)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"second": None}, "has no second; start the server with weights of the workers' model"),
        ({"second": torch.ones(2, 5)}, r"second has the shape \[2, 5\], in the worker \[5, 2\]"),
        ({"second": torch.full((5, 2), float("nan"))}, "second contains NaN or infinity"),
        ({}, None),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], message: str | None
) -> None:
    tensors = {name: each for name, each in {**Line().state_dict(), **changed}.items() if each is not None}
    path = tmp_path / "w.safetensors"
    with pytest.raises(NotFound):
        DiLoCoServer(tmp_path / "outer", 1, from_checkpoint=path).start()
    save_file(tensors, path)
    refused = contextlib.nullcontext() if message is None else pytest.raises(StateMismatch, match=message)
    with DiLoCoServer(tmp_path / "outer", 1, from_checkpoint=path) as server, refused:
        train_by_hand(server, 0, 0)


@pytest.mark.parametrize("fragments", [1, 2])
def test_overlapped_rounds_equal_a_plain_computation(tmp_path: Path, fragments: int) -> None:
    """A fragment is sent at one step, and its result taken two steps later, mixed half and half; bitwise."""
    options: dict[str, Any] = {"sync_every": 8, "num_fragments": fragments, "overlap_steps": 2, "bf16_comm": False}
    with DiLoCoServer(tmp_path, 2, rules=rules(2)) as server:
        models = all_together(
            [lambda number=number: train_by_hand(server, number, 27, **options) for number in range(2)]
        )
    expected = plain_overlap(workers=2, steps=27, every=8 // fragments, overlap=2, fragments=fragments)
    assert all(same(model, other) for model, other in zip(models, expected, strict=True))
    assert not same(*models)


def test_a_worker_trains_while_a_submission_travels(tmp_path: Path) -> None:
    """The round cannot end before the other worker submits, which it does after the first one's further steps."""
    with DiLoCoServer(tmp_path, 2, rules=rules(2)) as server:
        workers, models, optimizers = [], [], []
        for number in range(2):
            models.append(Line(seed=0))
            optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.1))
            options = WorkerOptions(
                server.address, token=server.token, worker_id=f"w{number}", sync_every=4, overlap_steps=3
            )
            workers.append(DiLoCoWorker(models[-1], options))
            workers[-1].join()
        done = []
        for number, steps in ((0, 6), (1, 7), (0, 1)):
            for _ in range(steps):
                local_step(models[number], optimizers[number], number, 0)
                if workers[number].count_step(8):
                    done.append((number, workers[number].synchronize()))
        assert [number for number, each in done if each is None] == [0, 1]
        assert [(number, each.version, each.local_steps) for number, each in done if each] == [(1, 1, 4), (0, 1, 4)]
        for worker in workers:
            worker.leave()


def test_a_flight_that_does_not_reach_the_server_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What quantization had lost before is not lost, and the next synchronization sends the steps of both."""
    monkeypatch.setattr("dalsegno.diloco.worker.exchange.retry_delay", lambda attempt: 0.0)
    server = DiLoCoServer(tmp_path, 1, rules=rules(1))
    server.start()
    model = Line()
    options = WorkerOptions(
        server.address,
        token=server.token,
        worker_id="w0",
        sync_every=2,
        overlap_steps=1,
        max_sync_retries=1,
        int8_comm=True,
    )
    worker = DiLoCoWorker(model, options)
    worker.join()
    port = int(server.address.rpartition(":")[2])
    server.stop()
    worker.snapshot.errors["first"].fill_(1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = []
    for step in range(4):
        if step == 3:
            server = DiLoCoServer(tmp_path, 1, rules=rules(1), port=port)
            server.start()
        local_step(model, optimizer, 0, step)
        if worker.count_step(8):
            done.append(worker.synchronize())
        if step == 2:
            skipped = done[-1]
            assert skipped is not None and skipped.version is None
            assert torch.equal(worker.snapshot.errors["first"], torch.full((6, 5), 1e-3))
    local_step(model, optimizer, 0, 4)
    assert worker.count_step(8)
    landed = worker.synchronize()
    assert landed is not None and (landed.round, landed.version, landed.samples) == (1, 1, 32)
    worker.leave()
    server.stop()


def test_fragments_in_turn(tmp_path: Path) -> None:
    """Each synchronization is of one fragment; the others keep what their worker has trained."""
    before = Line(seed=0)
    with DiLoCoServer(tmp_path, 1, rules=rules(1)) as server:
        model, optimizer = Line(seed=0), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = WorkerOptions(
            server.address, token=server.token, worker_id="w0", sync_every=4, num_fragments=2, bf16_comm=False
        )
        worker = DiLoCoWorker(model, options)
        worker.join()
        seen = []
        for step in range(4):
            local_step(model, optimizer, 0, step)
            if worker.count_step(8):
                trained = {name: each.detach().clone() for name, each in model.named_parameters()}
                done = worker.synchronize()
                moved = [name for name, each in model.named_parameters() if not torch.equal(each, trained[name])]
                seen.append((step, done.version, done.local_steps, moved))
        worker.leave()
    assert seen == [(1, 1, 2, ["first"]), (3, 2, 2, ["second"])]
    assert not torch.equal(model.first, before.first)


def test_asynchronous_submissions_in_turn_equal_a_plain_computation(tmp_path: Path) -> None:
    """Two workers that submit one after the other, with delayed Nesterov: each is applied alone, on arrival."""
    make = delayed_nesterov(0.5, 0.9, buffer_size=2)
    with DiLoCoServer(tmp_path, 2, make, rules(2, asynchronous=True)) as server:
        workers, models, optimizers = [], [], []
        for number in range(2):
            model = Line(seed=0)
            options = WorkerOptions(
                server.address, token=server.token, worker_id=f"w{number}", sync_every=3, bf16_comm=False
            )
            models.append(model)
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.01))
            workers.append(DiLoCoWorker(model, options))
            workers[-1].join()
        staleness = []
        whole = Line(seed=0)
        trained = [name for name, each in whole.named_parameters() if each.requires_grad]
        outer = make([whole.get_parameter(name) for name in trained])
        bases = [{name: whole.get_parameter(name).detach().clone() for name in trained} for _ in range(2)]
        for turn in range(3):
            for number in range(2):
                for step in range(3):
                    local_step(models[number], optimizers[number], number, 3 * turn + step)
                    due = workers[number].count_step(8)
                assert due
                for name in trained:
                    parameter = whole.get_parameter(name)
                    parameter.grad = bases[number][name] - models[number].get_parameter(name).detach()
                outer.step()
                bases[number] = {name: whole.get_parameter(name).detach().clone() for name in trained}
                staleness.append(workers[number].synchronize().staleness)
                assert same(models[number], whole)
        for worker in workers:
            worker.leave()
    assert staleness == [0, 1, 1, 1, 1, 1]


def test_local_steps_follow_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic local updates: a worker half as fast gets half the steps; it is in the journal, and so repeated."""
    speeds = {"w0": 10.0, "w1": 5.0}
    monkeypatch.setattr(
        "dalsegno.diloco.wire.messages.Submission.speed", property(lambda submission: speeds[submission.worker_id])
    )
    given = rules(2, dylu=True, dylu_base_sync_every=8)
    with DiLoCoServer(tmp_path, 2, rules=given) as server:
        all_together(
            [lambda number=number: train_by_hand(server, number, 4, sync_every=4, dylu=True) for number in range(2)]
        )
        state = server.coordinator._run.state
        assert [state.members[name].results[1].sync_every for name in ("w0", "w1")] == [8, 4]


def test_a_killed_worker_and_a_killed_server_change_nothing(tmp_path: Path) -> None:
    """The Trainer as a worker: killed between two checkpoints, it repeats what the server already has; the server is
    killed at the same time. Weights of the workers and the global ones, and every record of the workers' logs."""

    def run(folder: Path, kill: bool) -> list[dict[str, Any]]:
        server = DiLoCoServer(folder / "outer", 2, rules=rules(2))
        server.start()
        address = server.address
        first = start_ranks(train_as_worker, 1, folder / "w0", address, server.token, 0)
        second = start_ranks(train_as_worker, 1, folder / "w1", address, server.token, 1, 17 if kill else None)
        ends = [second.wait()[0]]
        if kill:
            assert ends[0].was_killed, ends[0].error
            abandon(server)
            port = int(address.rpartition(":")[2])
            server = DiLoCoServer(folder / "outer", 2, rules=rules(2), port=port)
            server.start()
            ends = start_ranks(train_as_worker, 1, folder / "w1", address, server.token, 1, 17).wait()
        ends.insert(0, first.wait()[0])
        server.stop()
        assert [end.exit_code for end in ends] == [0, 0], [end.error for end in ends]
        return [end.value for end in ends]

    whole, parts = run(tmp_path / "whole", False), run(tmp_path / "parts", True)
    assert whole == parts
    for log in ("w0/logs/train.jsonl", "w1/logs/train.jsonl", "outer/logs/train.jsonl"):
        records = [
            [drop_wall_clock(record) for record in read_records(tmp_path / run / log)] for run in ("whole", "parts")
        ]
        assert records[0] == records[1], log
    synced = [each for each in read_records(tmp_path / "parts/w1/logs/train.jsonl") if each.get("kind") == "sync"]
    assert [(each["round"], each["version"], each["global_step"]) for each in synced] == [
        (number, number, 4 * number) for number in range(1, 7)
    ]


def abandon(server: DiLoCoServer) -> None:
    """End a server as a kill would: without a checkpoint."""
    Coordinator.close, close = lambda self: self._run.close(save=False), Coordinator.close  # type: ignore[method-assign]
    try:
        server.stop()
    finally:
        Coordinator.close = close  # type: ignore[method-assign]


def trained_by(tmp_path: Path, ranks: int, *arguments: Any, **options: Any) -> dict[str, list[Any]]:
    """The parameters of a worker of so many ranks, which agree on those that several of them have."""
    with DiLoCoServer(tmp_path / "outer", 1, rules=rules(1)) as server:
        train = partial(train_as_ranks, tmp_path / "run", server.address, str(server.token))
        results = run_ranks(partial(train, *arguments, **options), ranks)
    found: dict[str, list[Any]] = {}
    for result in results:
        assert all(found.get(name, tensor) == tensor for name, tensor in result.items())
        found |= result
    return found


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp x fsdp", "pp"])
def test_ranks_act_as_one_worker(tmp_path: Path, layout: str) -> None:
    """Ranks beside a plain process: all have the global parameters afterwards, those that a plain computation of the
    same gradients leads to."""
    ranks, _ = LAYOUTS[layout]
    together, alone = trained_by(tmp_path / "together", ranks, layout), trained_by(tmp_path / "alone", 1, "one")
    assert together.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(torch.tensor(together[name]), torch.tensor(tensor), rtol=1e-5, atol=1e-6)
    (record,) = list(read_records(tmp_path / "together/outer/logs/train.jsonl"))[-1:]
    (other,) = list(read_records(tmp_path / "alone/outer/logs/train.jsonl"))[-1:]
    assert record["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "options"), [("tp", {}), ("pp", {}), ("pp", {"int8_comm": True, "overlap_steps": 2})]
)
def test_ranks_resume_as_one_worker(tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    """Stopped in the midst of a round; with overlap, while a submission travels."""
    parts = trained_by(tmp_path / "parts", 2, layout, stops=(4, 8), **options)
    assert [leg.first_step for leg in RunFile(tmp_path / "parts/run").load().legs] == [0, 4]
    assert parts == trained_by(tmp_path / "whole", 2, layout, stops=(8,), **options)


def test_a_synchronization_without_a_server_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one, with the server back, sends the steps of both."""
    monkeypatch.setattr("dalsegno.diloco.worker.exchange.retry_delay", lambda attempt: 0.0)
    server = DiLoCoServer(tmp_path, 1, rules=rules(1))
    server.start()
    model = Line()
    options = WorkerOptions(server.address, token=server.token, worker_id="w0", sync_every=2, max_sync_retries=1)
    worker = DiLoCoWorker(model, options)
    worker.join()
    port = int(server.address.rpartition(":")[2])
    server.stop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        local_step(model, optimizer, 0, step)
        worker.count_step(8)
    assert worker.synchronize().to_record().items() >= {"round": 1, "skipped": True, "samples": 16}.items()
    with DiLoCoServer(tmp_path, 1, rules=rules(1), port=port):
        for step in range(2):
            local_step(model, optimizer, 0, step)
            worker.count_step(8)
        done = worker.synchronize()
        assert (done.round, done.version, done.samples, done.local_steps) == (1, 1, 32, 2)
        worker.leave()


def test_a_result_that_is_cut_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had arrived of it does not count for what quantization has lost."""
    monkeypatch.setattr("dalsegno.diloco.worker.exchange.retry_delay", lambda attempt: 0.0)
    fetch, cuts = Exchange.fetch, []

    def cut_once(exchange: Exchange, result: Result, specs: Specs) -> Verdict:
        if result.version == 0 or cuts:
            return fetch(exchange, result, specs)
        cuts.append(result)
        for tensor in exchange.snapshot.tensors.values():
            tensor.zero_()
        return Verdict.AGAIN

    monkeypatch.setattr(Exchange, "fetch", cut_once)
    with DiLoCoServer(tmp_path, 1, rules=rules(1)) as server:
        model = train_by_hand(server, 0, 12, sync_every=4, int8_comm=True)
    assert len(cuts) == 1
    assert same(model, plain_rounds(1, 3, 4, nesterov(), torch.int8))


def test_a_worker_without_a_server_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dalsegno.diloco.worker.exchange.retry_delay", lambda attempt: 0.0)
    with pytest.raises(NotRunning, match="refused"):
        DiLoCoWorker(Line(), WorkerOptions("127.0.0.1:9", max_sync_retries=1)).join()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    def options(server: DiLoCoServer) -> WorkerOptions:
        return WorkerOptions(server.address, token=server.token, worker_id="w0")

    with DiLoCoServer(tmp_path / "a", 1) as server:
        worker = DiLoCoWorker(Line(), options(server))
        worker.join()
        state = worker.state_dict()
        worker.leave()
    with DiLoCoServer(tmp_path / "b", 1) as server:
        other = DiLoCoWorker(Line(), options(server))
        other.join()
        other.leave()
        worker = DiLoCoWorker(Line(), options(server))
        worker.load_state_dict(state)
        with pytest.raises(StateMismatch, match="is of DiLoCo run"):
            worker.join()


def test_only_what_is_published_on_disk_is_given_up_after_a_resume(tmp_path: Path) -> None:
    """A resume from a checkpoint in memory must not let the server forget what the one on disk needs."""
    with DiLoCoServer(tmp_path, 1, rules=rules(1)) as server:
        options = WorkerOptions(server.address, token=server.token, worker_id="w", sync_every=1)
        worker = DiLoCoWorker(Line(seed=0), options)
        worker.join()
        for _ in range(3):
            worker.count_step(1)
            worker.synchronize()
        state = worker.state_dict()
        worker.leave()
    resumed = DiLoCoWorker(Line(seed=0), options)
    resumed.load_state_dict(state)
    assert (state["rest"]["count"], resumed._next_submission(None, 1.0).saved) == (3, 0)
    worker.note_saved(5)
    worker.load_state_dict(state)  # a rollback
    assert worker._next_submission(None, 1.0).saved == 3
