"""Callbacks that add to records or print: the same values on every layout, and the right ones."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from callbacks.layouts import (
    assert_same_values,
    layout_trainer,
    on_every_layout,
    sentences,
    train_with_padding,
)
from dalsegno.callbacks import (
    CountParams,
    DurationProfiler,
    ExpertLoadBalance,
    GarbageCollection,
    GradHistogram,
    JsonLogger,
    LearningDynamics,
    LogInputSummaries,
    LogOptimizerParamGroup,
    PeakMemory,
    RateProfiler,
    SamplesStreamedInfo,
    ScaleLoss,
    ScopedFlags,
    SlowRankDetector,
)
from dalsegno.callbacks.loggers.info_callback import count_parameters
from dalsegno.logs import read_records
from support.listeners import Listener
from support.small import small_trainer

WALL_CLOCK = ("timestamp", "peak_mem", "_runtime", "_per_second", "data_share")


def all_of_them() -> Sequence[ds.Callback]:
    return [
        SamplesStreamedInfo(),
        LogOptimizerParamGroup(["lr", "betas"]),
        LogInputSummaries(),
        RateProfiler(),
        DurationProfiler(),
        SlowRankDetector(),
        PeakMemory(do_log=True),
        GradHistogram(every=2),
        LearningDynamics(every=3),
        ExpertLoadBalance(every=2, router=r"blocks\.0$"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return on_every_layout(tmp_path_factory.mktemp("describing"), all_of_them)


@pytest.mark.parametrize("log", ["train.jsonl", "grad_histograms.jsonl"])
def test_the_same_on_every_layout(runs: dict[str, Path], log: str) -> None:
    assert_same_values(runs, f"logs/{log}", WALL_CLOCK)


def test_padding_counts_nowhere(tmp_path: Path) -> None:
    runs = on_every_layout(tmp_path, all_of_them, train_with_padding)
    assert 6 in {record["global_step"] for record in records(runs["fsdp"])}
    for log in ("train.jsonl", "grad_histograms.jsonl"):
        assert_same_values(runs, f"logs/{log}", WALL_CLOCK)
    assert_same_values(runs, "logs/learning_dynamics.jsonl", [*WALL_CLOCK, "gradient_snr"])


def test_learning_dynamics_on_every_layout(runs: dict[str, Path]) -> None:
    """Noise is what is left of large numbers that nearly cancel out: fewer digits."""
    assert_same_values(runs, "logs/learning_dynamics.jsonl", [*WALL_CLOCK, "gradient_snr"])
    assert_same_values(runs, "logs/learning_dynamics.jsonl", WALL_CLOCK, rel=1e-3)


def records(run: Path, log: str = "train.jsonl", kind: str | None = None) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "logs" / log) if record.get("kind") == kind]


def test_what_one_process_writes(runs: dict[str, Path]) -> None:
    first, second, third, last = records(runs["none"])
    assert [first["samples"], last["samples"]] == [16, 64]
    assert first["lr/0"] == pytest.approx(0.05 * 6 / 8) and first["betas/0"] == [0.9, 0.999]
    assert first["samples_per_second"] > 0 and "rank_runtime" not in first
    sections = [key for key in first if key.endswith("_runtime")]
    assert len(sections) == 8 and all(first[section] >= 0 for section in sections)
    assert last["remaining_runtime"] == third["evaluate_runtime"] > 0 == second["evaluate_runtime"]  # one more follows
    assert len(first["rank_peak_mem"]) == 1
    assert {key for key in first if key.startswith("expert_load")} == {
        f"expert_load/blocks.0/{what}" for what in ("max", "entropy", "idle")
    }


def test_what_two_ranks_write(runs: dict[str, Path]) -> None:
    for layout in ("ddp", "fsdp"):
        first = records(runs[layout])[0]
        assert len(first["rank_samples_per_second"]) == len(first["rank_runtime"]) == len(first["rank_peak_mem"]) == 2
        assert sum(first["rank_samples_per_second"]) == pytest.approx(first["samples_per_second"])


def test_histograms_count_every_entry(runs: dict[str, Path]) -> None:
    for record in records(runs["none"], "grad_histograms.jsonl"):
        sizes = {name: p.numel() for name, p in Uneven().named_parameters() if p.requires_grad}
        assert {
            name: sum(row) + record["zeros"][name] + record["nonfinite"][name] for name, row in record["counts"].items()
        } == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "column"),
    [
        (1.0, 40),
        (1.9, 40),
        (2.0, 41),
        (0.5, 39),
        (-0.75, 39),
        (2.0**-40, 0),
        (1e-30, 0),
        (1e-39, 0),  # smaller than normal
        (2.0**15, 55),
        (1e30, 55),
        (-math.inf, None),
        (math.nan, None),
    ],
)
def test_bins_are_powers_of_two(tmp_path: Path, value: float, column: int | None, dtype: torch.dtype) -> None:
    model = nn.Linear(2, 1, bias=False, dtype=dtype)

    def on_gradients_ready(ctx: Any) -> None:
        ctx.model.weight.grad = torch.tensor([[value, -0.0]], dtype=dtype)

    trainer = small_trainer(
        tmp_path,
        Listener({"on_gradients_ready": on_gradients_ready}),
        GradHistogram(every=1),
        model=model,
        parts={
            "train_dataset": [(torch.ones(2, dtype=dtype),)],
            "loss_fn": lambda outputs, batch: outputs.sum(),
        },
        max_steps=1,
        max_grad_norm=0.0,
        per_device_train_batch_size=1,
    )
    trainer.train()
    (record,) = records(tmp_path, "grad_histograms.jsonl")
    counts = record["counts"]["weight"]
    assert [index for index, count in enumerate(counts) if count] == ([] if column is None else [column])
    assert sum(counts) + record["nonfinite"]["weight"] == 1
    assert (record["zeros"]["weight"], record["lowest"], len(counts)) == (1, -40, 56)


def test_learning_dynamics_against_torch_itself(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def on_pre_optimizer_step(ctx: Any) -> None:
        kept["before"] = {name: p.detach().clone() for name, p in ctx.model.named_parameters()}

    def on_optimizer_step(ctx: Any) -> None:
        for name, parameter in ctx.model.named_parameters():
            if parameter.requires_grad:
                old, new = kept["before"][name].double(), parameter.detach().double()
                state, step = ctx.optimizer.state[parameter], ctx.state.global_step + 1
                mean = state["exp_avg"].double() / (1 - 0.9**step)
                square = state["exp_avg_sq"].double() / (1 - 0.999**step)
                signal = float(mean.square().sum())
                kept[step, name] = (
                    float((new - old).norm() / old.norm()),
                    signal / (float(square.sum()) - signal),
                )

    witness = Listener(
        {"on_pre_optimizer_step": on_pre_optimizer_step, "on_optimizer_step": on_optimizer_step}, name="witness"
    )
    layout_trainer(tmp_path, "none", [LearningDynamics(every=4), witness]).train()
    written = records(tmp_path, "learning_dynamics.jsonl")
    assert [record["global_step"] for record in written] == [4, 8]
    for record in written:
        assert "frozen" not in record["update_ratios"]
        for name in record["update_ratios"]:
            ratio, snr = kept[record["global_step"], name]
            assert record["update_ratios"][name] == pytest.approx(ratio, rel=1e-4)
            assert record["gradient_snr"][name] == pytest.approx(snr, rel=1e-3)


def test_input_summaries_against_the_batch(tmp_path: Path) -> None:
    batches: list[Tensor] = []
    listener = Listener({"on_microbatch_begin": lambda ctx: batches.append(ctx.batch["tokens"])}, name="witness")
    layout_trainer(tmp_path, "none", [LogInputSummaries(), listener]).train()
    for number, record in enumerate(records(tmp_path)):
        tokens = batches[4 * number + 2].double()  # of two steps of two micro-batches, the second's first
        logged = [record[f"input/tokens/{what}"] for what in ("mean", "std", "min", "max")]
        expected = [tokens.mean(), tokens.std(unbiased=False), tokens.min(), tokens.max()]
        assert logged == pytest.approx([float(each) for each in expected])


def test_a_spread_beside_a_large_mean(tmp_path: Path) -> None:
    """Times in seconds, say: of the difference of two large squares nothing would be left."""
    seconds = torch.randn(20, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1.7e9
    data = [{"x": torch.zeros(8), "y": torch.zeros(1), "seconds": each} for each in seconds]

    class Punctual(nn.Linear):
        def forward(self, x: Tensor, y: Tensor, seconds: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    batches: list[Tensor] = []
    listener = Listener({"on_microbatch_begin": lambda ctx: batches.append(ctx.batch["seconds"])}, name="witness")
    own = [LogInputSummaries(), JsonLogger(), listener]
    small_trainer(
        tmp_path, *own, model=Punctual(8, 1), parts={"train_dataset": data}, max_steps=1, logging_steps=1
    ).train()
    (record,) = records(tmp_path)
    assert record["input/seconds/std"] == pytest.approx(float(batches[0].std(unbiased=False)), rel=1e-5)


def test_groups_of_one_name_are_told_apart(tmp_path: Path) -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    named = [("body", 0.1), ("body", 0.2), ("head", 0.3), (None, 0.4)]
    groups = [
        {"params": list(part.parameters()), "lr": lr} | ({} if name is None else {"name": name})
        for part, (name, lr) in zip(model, named, strict=True)
    ]
    model.forward = lambda x, y: sum(part(y) for part in model).square().mean()  # type: ignore[method-assign,assignment,arg-type,union-attr]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    settings = {"max_steps": 1, "logging_steps": 1, "lr_scheduler_type": "constant"}
    own = [LogOptimizerParamGroup("lr"), JsonLogger()]
    small_trainer(tmp_path, *own, model=model, parts={"optimizer": optimizer}, **settings).train()
    (record,) = records(tmp_path)
    assert {key: record[key] for key in record if key.startswith("lr/")} == {
        "lr/0": 0.1,
        "lr/1": 0.2,
        "lr/head": 0.3,
        "lr/3": 0.4,
    }


def test_a_table_of_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_trainer(tmp_path, CountParams(depth=1), max_steps=1).train()
    assert capsys.readouterr().out.splitlines() == [
        "module     class           parameters  trained    MB",
        "layers     Sequential             161      161  0.00",
        "the model  TinyRegression         161      161  0.00",
    ]


def test_tied_and_frozen_parameters_are_counted_as_they_are() -> None:
    model = Uneven()
    whole, *parts = count_parameters(model)
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    assert whole.parameters - whole.trained == 3
    assert whole.size == 4 * whole.parameters
    assert [part.module for part in parts] == ["embed", "blocks", "blocks.0", "blocks.1"]


def test_settings_that_no_group_has(tmp_path: Path) -> None:
    with pytest.raises(ds.UnknownName, match="'weight_deccay'; did you mean 'weight_decay'"):
        small_trainer(tmp_path, LogOptimizerParamGroup("weight_deccay"), max_steps=1).train()


def test_experts_that_get_too_much(tmp_path: Path) -> None:
    """Scores that send every token to the same of four experts."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4)
            nn.init.zeros_(self.router.weight)
            self.router.bias.data = torch.tensor([0.0, 9.0, 0.0, 0.0])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.router(x).softmax(-1).sum(-1) - y[:, 0]).square().mean()

    callbacks = [ExpertLoadBalance(every=1), JsonLogger()]
    small_trainer(tmp_path, *callbacks, model=Mixture(), max_steps=1, logging_steps=1).train()
    (record,) = records(tmp_path)
    logged = {key.rpartition("/")[2]: value for key, value in record.items() if key.startswith("expert_load/router")}
    assert logged == {"max": 4.0, "entropy": 0.0, "idle": 3.0}


class Routed(nn.Module):
    """A router that puts out a dict, whose last entry is the scores; or something that is none."""

    def __init__(self, scores: bool) -> None:
        super().__init__()
        self.router = Router(scores)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (sum(each.mean() for each in self.router(x).values() if each is not None) - y[:, 0]).square().mean()


class Router(nn.Linear):
    def __init__(self, scores: bool) -> None:
        super().__init__(8, 4)
        self.scores = scores

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return {"bias": None, "scores": scores} if self.scores else {"mean": scores.mean()}


def test_a_router_that_puts_out_a_dict(tmp_path: Path) -> None:
    own = [ExpertLoadBalance(every=1), JsonLogger()]
    small_trainer(tmp_path / "dict", *own, model=Routed(True), max_steps=1, logging_steps=1).train()
    assert "expert_load/router/max" in records(tmp_path / "dict")[0]
    with pytest.raises(ds.ConfigurationError, match="router returns no expert scores, but a dict"):
        small_trainer(tmp_path / "none", ExpertLoadBalance(every=1), model=Routed(False), max_steps=1).train()


def test_a_router_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"no module's name matches .*; the model has layers, layers.0"):
        small_trainer(tmp_path, ExpertLoadBalance(), max_steps=1).train()


def test_collections_come_when_they_are_due(tmp_path: Path) -> None:
    seen: list[bool] = []
    collected: list[int] = []
    watch = Listener({"on_step_end": lambda ctx: seen.append(gc.isenabled())}, name="watch")

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(info["generation"])

    gc.callbacks.append(note)
    try:
        small_trainer(tmp_path, GarbageCollection(every=2), watch, max_steps=5).train()
    finally:
        gc.callbacks.remove(note)
    assert seen == [False] * 5 and gc.isenabled()
    assert collected[-4:] == [2, 1, 1, 2]


def test_a_scaled_loss(tmp_path: Path) -> None:
    plain, scaled = (records_of(tmp_path / name, *own) for name, own in (("plain", []), ("scaled", [ScaleLoss(0.5)])))
    assert scaled[0]["loss"] == pytest.approx(plain[0]["loss"] / 2)
    assert scaled[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"] / 2)


def records_of(folder: Path, *own: ds.Callback) -> list[dict[str, Any]]:
    small_trainer(folder, *own, JsonLogger(), max_steps=1, logging_steps=1).train()
    return records(folder)


def test_flags_are_set_back_whatever_happens(tmp_path: Path) -> None:
    before = torch.backends.cudnn.benchmark
    seen: list[bool] = []

    def on_step_end(ctx: Any) -> None:
        seen.append(torch.backends.cudnn.benchmark)
        raise RuntimeError("in the middle")

    breaker = Listener({"on_step_end": on_step_end})
    with pytest.raises(RuntimeError, match="in the middle"):
        small_trainer(tmp_path, ScopedFlags({"cudnn.benchmark": not before}), breaker, max_steps=3).train()
    assert seen == [not before] and torch.backends.cudnn.benchmark == before


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ScopedFlags({"cudnn.benchmrk": True}), "'cudnn.benchmrk'; did you mean 'cudnn.benchmark'"),
        (lambda: ScopedFlags({"cudnn.benchmark": 1}), r"torch.backends.cudnn.benchmark is a bool"),
        (lambda: ScaleLoss("a"), "value='a'; needs a finite number"),  # type: ignore[arg-type]
        (lambda: LogOptimizerParamGroup([]), r"keys=\[\]; needs a string, or a list of strings"),
        (lambda: CountParams(depth=0), "depth=0; needs an integer of at least 1"),
        (lambda: GarbageCollection(every=1.5), "every=1.5; needs an integer"),  # type: ignore[arg-type]
        (lambda: ExpertLoadBalance(router="("), "is not a regular expression"),
        (lambda: PeakMemory(summary_writer=3), "it has no add_scalar"),
        (lambda: PeakMemory(file_prefix="a/b"), "without folders"),
        (lambda: SlowRankDetector(factor=1), "factor=1; needs a finite number over 1"),
    ],
)
def test_wrong_arguments(build: Any, message: str) -> None:
    with pytest.raises(ds.DalsegnoError, match=message):
        build()


def test_sentences_are_the_same_each_time() -> None:
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(sentences(), sentences(), strict=True))
