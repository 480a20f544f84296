"""LogLosses: against the losses of single tokens, added up by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import dalsegno as ds
from dalsegno.callbacks import LogLosses
from dalsegno.distributed import collectives
from dalsegno.logs.values import drop_wall_clock
from dalsegno.testing import run_ranks
from support.listeners import Listener
from support.small import arguments, small_trainer

Records = dict[tuple[str, int], dict[str, Any]]
"""By kind and step."""


def texts(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Of eight tokens, of which the loss counts as many as it happens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (count, 8), generator=generator)
    counted = torch.arange(8) < torch.randint(2, 9, (count, 1), generator=generator)
    return [
        {"input_ids": row, "labels": labels} for row, labels in zip(ids, torch.where(counted, ids, -100), strict=True)
    ]


class Speaks(nn.Module):
    """Returns its mean loss per token, what a mixture of experts would add, and its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.embed(input_ids))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "router_z_loss": scores.logsumexp(-1).square().mean(), "logits": scores, "accuracy": loss}


class Seen(NamedTuple):
    """A batch of one rank."""

    samples: int
    loss: float
    of_tokens: float
    tokens: int
    z_loss: float


Batches = dict[tuple[str, int], list[Seen]]
"""Of one rank, by kind and step."""


class ByHand:
    """Adds up what each batch's tokens lose; ``shift`` is the number of tokens of a text that no one predicts."""

    def __init__(self, shift: int = 0, z_loss: str = "router_z_loss") -> None:
        self.records: Records = {}
        self.seen: Batches = {}
        self._shift, self._z_loss = shift, z_loss

    def listener(self) -> ds.Callback:
        handlers = {"on_microbatch_end": self._train, "on_prediction_step": self._evaluate, "on_log": self._log}
        return Listener(handlers, name="by hand")

    def _train(self, ctx: Any) -> None:
        self._add(ctx, ("train", ctx.state.global_step + 1))

    def _evaluate(self, ctx: Any) -> None:
        self._add(ctx, ("eval", ctx.state.global_step))

    def _add(self, ctx: Any, when: tuple[str, int]) -> None:
        if not ctx.samples:
            return
        labels = ctx.batch["labels"][:, self._shift :]
        scores = ctx.outputs["logits"][:, : labels.shape[1]].detach().double()
        each = -scores.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        counted = labels != -100
        loss, z_loss = float(ctx.outputs["loss"]), float(ctx.outputs[self._z_loss])
        seen = Seen(ctx.samples, loss, float(each[counted].sum()), int(counted.sum()), z_loss)
        self.seen.setdefault(when, []).append(seen)

    def _log(self, ctx: Any) -> None:
        self.records[ctx.kind, ctx.state.global_step] = dict(ctx.logs)


def mean(values: list[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def assert_as_by_hand(ranks: list[tuple[Records, Batches]], z_loss: str = "router_z_loss") -> None:
    """Each record covers the two steps up to it, or the evaluation at it."""
    records = ranks[0][0]
    assert {kind for kind, _ in records} == {"train", "eval", "final"}
    for (kind, step), record in records.items():
        if kind == "final":
            continue
        steps = [step] if kind == "eval" else [step - 1, step]
        of_ranks = [[each for step in steps for each in seen.get((kind, step), [])] for _, seen in ranks]
        batches = [each for of_rank in of_ranks for each in of_rank]
        prefix = "eval_" if kind == "eval" else ""
        tokens = sum(each.tokens for each in batches)
        expected = {
            f"{prefix}perplexity": math.exp(sum(each.of_tokens for each in batches) / tokens),
            f"{prefix}{z_loss}": mean([(each.z_loss, each.samples) for each in batches]),
        }
        if kind == "train" and len(ranks) > 1:
            means = [mean([(each.loss, each.samples) for each in of_rank]) for of_rank in of_ranks]
            expected["max_rank_loss"] = max(means)
            assert min(means) < record["loss"] < max(means)
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-5), (kind, step)
        assert ("max_rank_loss" in record) == ("max_rank_loss" in expected)
        assert "accuracy" not in record and "eval_accuracy" not in record
        assert record[f"{prefix}perplexity"] != pytest.approx(math.exp(record[f"{prefix}loss"]), rel=1e-3)


def speak(output_dir: Path, parallel: str, leave_at: int = 0) -> tuple[Records, Batches]:
    """Two micro-batches of four texts a step, over all ranks; the last step of an epoch has five."""

    def leave(ctx: Any) -> None:
        if ctx.state.global_step == leave_at:
            ctx.control.stop("for now")

    torch.manual_seed(0)
    args = arguments(
        output_dir,
        parallel=parallel,
        per_device_train_batch_size=4 // collectives.world_size(),
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=8,
        logging_steps=2,
        eval_steps=4,
        disable_tqdm=True,
    )
    by_hand = ByHand()
    callbacks = [LogLosses(), by_hand.listener(), Listener({"on_step_end": leave}, name="leaver")]
    data = {"train_dataset": texts(21), "eval_dataset": texts(7, seed=1)}
    ds.Trainer(Speaks(), args, callbacks=callbacks, **data).train()
    return by_hand.records, by_hand.seen


def test_perplexity_by_tokens_and_other_losses_by_name(tmp_path: Path) -> None:
    assert_as_by_hand([speak(tmp_path, "none")])


def test_over_ranks_with_the_largest_loss_of_one(tmp_path: Path) -> None:
    ranks = run_ranks(speak, 2, tmp_path, "ddp")
    one, other = ({when: drop_wall_clock(record) for when, record in records.items()} for records, _ in ranks)
    assert one == other
    assert_as_by_hand(ranks)


def test_resumed_between_two_records_on_fewer_ranks(tmp_path: Path) -> None:
    """The first one after the resume covers a step of two ranks and one of a single rank."""
    before = run_ranks(speak, 2, tmp_path, "ddp", 5)
    records, seen = speak(tmp_path, "none")
    seen["train", 5] = [each for _, of_rank in before for each in of_rank["train", 5]]
    assert len(seen["train", 5]) == 4
    assert_as_by_hand([(records, seen)])


def mixtral() -> nn.Module:
    """Its router's loss is as large as that of its tokens."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.8))


class Switch(SwitchTransformersForConditionalGeneration):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, output_router_logits=True)


def switch() -> nn.Module:
    sizes = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "num_experts": 4}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0}
    coefficients = {"router_z_loss_coef": 0.3, "router_aux_loss_coef": 0.2, "add_router_probs": True}
    config = SwitchTransformersConfig(**sizes, **sparse, **coefficients, pad_token_id=0, dropout_rate=0.0)
    return Switch(config)


@pytest.mark.parametrize(("build", "shift", "z_loss"), [(mixtral, 1, "aux_loss"), (switch, 0, "encoder_z_loss")])
def test_mixtures_of_experts_of_hugging_face(
    tmp_path: Path, build: Callable[[], nn.Module], shift: int, z_loss: str
) -> None:
    """Perplexity is that of the tokens, without what the routers add to the loss."""
    torch.manual_seed(0)
    by_hand = ByHand(shift, z_loss)
    parts = {"train_dataset": texts(12), "eval_dataset": texts(7, seed=1)}
    settings = {"max_steps": 4, "logging_steps": 2, "eval_steps": 2, "per_device_eval_batch_size": 2}
    small_trainer(tmp_path, LogLosses(), by_hand.listener(), model=build(), parts=parts, **settings).train()
    assert_as_by_hand([(by_hand.records, by_hand.seen)], z_loss)


def test_tokens_of_ones_own(tmp_path: Path) -> None:
    """And none where the labels are not tokens."""
    records: list[dict[str, Any]] = []
    keeper = Listener({"on_log": lambda ctx: records.append(dict(ctx.logs)) if ctx.kind == "train" else None})
    weights = iter([1.0, 3.0])
    settings = {"max_steps": 2, "logging_steps": 2}
    small_trainer(tmp_path / "a", LogLosses(tokens=lambda batch: next(weights)), keeper, **settings).train()
    losses: list[float] = []
    listener = Listener({"on_microbatch_end": lambda ctx: losses.append(ctx.loss)}, name="losses")
    small_trainer(tmp_path / "b", LogLosses(), keeper, listener, **settings).train()
    assert records[0]["perplexity"] == pytest.approx(math.exp((losses[0] + 3 * losses[1]) / 4))
    assert "perplexity" not in records[1]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ds.ConfigurationError, match="tokens=7; needs a function of the batch"):
        LogLosses(tokens=7)  # type: ignore[arg-type]
