"""Further entries of the records: LogOptimizerParamGroup, LogInputSummaries, LogLosses, SamplesStreamedInfo,
ModelEvalMetrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn

from dalsegno.callbacks.argument_checks import mapping, texts
from dalsegno.data.build import IGNORED_LABEL
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError, expect_known
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.stateful.schema import Must


class LogOptimizerParamGroup(FlaglessCallback):
    """Logs each parameter group's learning rate or other settings in each training record, as ``<key>/<group>``.

    ``<group>`` is the group's ``name`` if it has a unique one, else its number. Values are read when the record is
    made: the learning rate is that of the next update.

    Args:
        keys: names of settings, such as ``["lr", "weight_decay"]``, or a single name; one that no group has is refused.
    """

    def __init__(self, keys: str | Iterable[str]) -> None:
        self._keys = texts("LogOptimizerParamGroup", "keys", keys)

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        known = {key for group in ctx.optimizer.param_groups for key in group} - {"params"}
        expect_known("LogOptimizerParamGroup: key", self._keys, known)

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train":
            return
        groups = ctx.optimizer.param_groups
        for title, group in zip(_titles(groups), groups, strict=True):
            for key in self._keys:
                if key in group:
                    value = group[key]
                    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
                    ctx.logs[f"{key}/{title}"] = float(value) if is_number else value


def _titles(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    titles = [str(group.get("name", number)) for number, group in enumerate(groups)]
    often = Counter(titles)
    return [title if often[title] == 1 else str(number) for number, title in enumerate(titles)]


class LogInputSummaries(FlaglessCallback):
    """Logs mean, standard deviation, minimum and maximum of each input tensor in each training record.

    They are ``input/<name>/mean``, ``std``, ``min`` and ``max``, of the step's first micro-batch over all ranks. Only
    for batches that are mappings; ``<name>`` is the key. Complex tensors are left out. NaN and infinity propagate.
    """

    def __init__(self) -> None:
        self._measured: dict[str, Tensor] = {}
        self._of_step = 0

    def on_microbatch_begin(self, ctx: contexts.MicrobatchBeginContext) -> None:
        if ctx.index or not ctx.state.will_log:
            return
        batch = ctx.batch if ctx.samples and isinstance(ctx.batch, Mapping) else {}  # padding is not measured
        tensors = {str(name): each for name, each in batch.items() if isinstance(each, Tensor)}
        self._measured = {name: _measure(each) for name, each in tensors.items() if not each.is_complex()}
        self._of_step = ctx.state.global_step + 1

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train" or self._of_step != ctx.state.global_step:
            return
        measured, self._measured = self._measured, {}
        for name, of_ranks in _of_data_ranks(ctx, measured, "LogInputSummaries").items():
            counts, means, deviations, lowest, highest = of_ranks.unbind(1)
            count = counts.sum()  # without elements, mean and deviation are NaN
            mean = (counts * means).sum() / count
            variance = (deviations + counts * (means - mean).square()).sum() / count
            ctx.logs[f"input/{name}/mean"] = float(mean)
            ctx.logs[f"input/{name}/std"] = float(variance.sqrt())
            ctx.logs[f"input/{name}/min"] = float(lowest.min())
            ctx.logs[f"input/{name}/max"] = float(highest.max())


def _measure(tensor: Tensor) -> Tensor:
    """Return count, mean, sum of squared deviations from the mean, minimum, maximum: shape (5,), in the device's widest
    dtype."""
    if not tensor.numel():
        return accelerator.wide(torch.tensor([0.0, 0.0, 0.0, torch.inf, -torch.inf], device=tensor.device))
    flat = accelerator.wide(tensor.detach())
    count = torch.full((), flat.numel(), dtype=flat.dtype, device=flat.device)
    mean = flat.mean()
    return torch.stack([count, mean, (flat - mean).square().sum(), flat.min(), flat.max()])


def _of_data_ranks(ctx: contexts.Context, measured: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """By name, the numbers of each rank that has measured them, in rows: float64. One of the ranks that read the same
    data stands for all. Collective."""
    numbers = torch.stack([*measured.values()]).tolist() if measured else []
    gathered = ctx.layout.of_data_ranks(collectives.gather(dict(zip(measured, numbers, strict=True)), what))
    return {
        name: torch.tensor([each[name] for each in gathered if name in each], dtype=torch.float64)
        for name in dict.fromkeys(name for each in gathered for name in each)
    }


class LossState(TypedDict):
    sums: dict[str, Annotated[Tensor, Must("two floats", lambda sums: sums.shape == (2,) and sums.is_floating_point())]]


class LogLosses(FlaglessCallback):
    """Logs perplexity, and the losses that the model returns beside its own, in records of training and evaluation:

    - ``perplexity``, ``eval_perplexity``: the exponential of the mean loss of a token. A batch's loss counts by the
      batch's tokens, however the training weighs it. Only with ``tokens``, or integers as ``labels``.
    - ``aux_loss``, ``eval_aux_loss``, ``router_z_loss`` …: each number that the model returns under a name that ends in
      ``loss``, such as the balance loss and the z-loss of a mixture of experts, by its name: the mean over samples.
    - ``max_rank_loss``: the largest of the ranks' own mean losses, where they read different data. In training only.

    All of them cover what was trained on since the last record, or the evaluation set.

    Args:
        tokens: (batch) → number of tokens whose mean the batch's loss is. None: the ``labels`` other than -100, without
            each row's first for a model of Hugging Face's that predicts the next token, which leaves it out.
    """

    state_scope = "per_rank"
    state_schema = LossState

    def __init__(self, tokens: Callable[[Any], float | Tensor] | None = None) -> None:
        if tokens is not None and not callable(tokens):
            raise ConfigurationError(f"LogLosses: tokens={tokens!r}; needs a function of the batch")
        self._tokens = tokens
        self._trained: dict[str, Tensor] = {}  # since the last record: weighted sum and sum of weights, by name
        self._evaluated: dict[str, Tensor] = {}
        self._prefix = "eval"

    def on_microbatch_end(self, ctx: contexts.MicrobatchEndContext) -> None:
        self._add(self._trained, ctx)

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        self._prefix, self._evaluated = "eval" if ctx.name == "eval" else f"eval_{ctx.name}", {}

    def on_prediction_step(self, ctx: contexts.PredictionStepContext) -> None:
        self._add(self._evaluated, ctx)

    def _add(
        self, sums: dict[str, Tensor], ctx: contexts.MicrobatchEndContext | contexts.PredictionStepContext
    ) -> None:
        if not ctx.samples:  # padding
            return
        losses = _losses(ctx.outputs)
        weighed: dict[str, tuple[Tensor, Any]] = {name: (loss, float(ctx.samples)) for name, loss in losses.items()}
        labels = ctx.batch.get("labels") if isinstance(ctx.batch, Mapping) else None
        if self._tokens is not None:
            weighed["perplexity"] = _of_tokens(losses, ctx.model), self._tokens(ctx.batch)
        elif isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex()):
            weighed["perplexity"] = _of_tokens(losses, ctx.model), _predicted(labels, ctx.model).ne(IGNORED_LABEL).sum()
        for name, (loss, count) in weighed.items():
            weight = count.to(loss) if isinstance(count, Tensor) else torch.full_like(loss, count)
            new = torch.stack([torch.where(weight > 0, loss * weight, weight), weight])  # of no token it is NaN
            sums[name] = new if name not in sums else sums[name].to(new) + new

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train":
            sums, self._trained, prefix = self._trained, {}, ""
        elif ctx.kind == "eval":
            sums, self._evaluated, prefix = self._evaluated, {}, f"{self._prefix}_"
        else:
            return
        for name, of_ranks in _of_data_ranks(ctx, sums, "LogLosses").items():
            total, weight = of_ranks.sum(0)
            if name == "perplexity":
                ctx.logs[f"{prefix}perplexity"] = float((total / weight).exp())
            elif name != "loss":
                ctx.logs[f"{prefix}{name}"] = float(total / weight)
            elif ctx.layout.data_size > 1 and ctx.kind == "train":
                ctx.logs["max_rank_loss"] = float((of_ranks[:, 0] / of_ranks[:, 1]).max())  # NaN, if there is one

    def state_dict(self) -> LossState:
        return {"sums": self._trained}

    def load_state_dict(self, state: Any) -> None:
        self._trained = dict(state["sums"])

    @classmethod
    def reshard(cls, states: Sequence[LossState], world_size: int) -> list[LossState]:
        """Rank 0 gets the sums of all."""
        sums: dict[str, Tensor] = {}
        for name, each in ((name, each) for state in states for name, each in state["sums"].items()):
            sums[name] = sums[name] + each if name in sums else each
        return [{"sums": {} if rank else sums} for rank in range(world_size)]


def _losses(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's loss and the others that it returns: 0-dim, in the device's widest dtype."""
    returned = outputs.get("outputs")
    others = returned if isinstance(returned, Mapping) else getattr(returned, "__dict__", {})
    return {
        name: accelerator.wide(value.detach().reshape(()))
        for name, value in {**others, **outputs}.items()
        if str(name).endswith("loss") and isinstance(value, Tensor) and value.numel() == 1
    }


# Hugging Face's models add router_aux_loss_coef * aux_loss and router_z_loss_coef * z_loss to the mean loss of the
# tokens, of which those that generate without an encoder predict each from the ones before it, and so not the first.


def _of_tokens(losses: Mapping[str, Tensor], model: Any) -> Tensor:
    """The mean loss of a token, without what a model of Hugging Face's adds for its routers."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    loss = losses["loss"]
    for name, other in losses.items():
        for kind in ("aux_loss", "z_loss"):
            coefficient = getattr(config, f"router_{kind}_coef", 0.0)
            if name.endswith(kind) and coefficient:  # one that is not part of it may be NaN
                loss = loss - coefficient * other
    return loss


def _predicted(labels: Tensor, model: Any) -> Tensor:
    """The labels that the loss may count."""
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    is_causal = getattr(model, "can_generate", bool)() and not has_encoder
    return labels[:, 1:] if is_causal and labels.dim() == 2 else labels


class SamplesStreamedInfo(FlaglessCallback):
    """Logs ``samples``, the samples trained on so far on all ranks, in each training record and the final one.

    Counts over all legs of the run, each sample as often as it was used. Padding does not count.
    """

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind in ("train", "final"):
            ctx.logs["samples"] = ctx.state.samples_seen


class ModelEvalMetrics(FlaglessCallback):
    """Computes metrics of the model's outputs, such as accuracy, in each evaluation::

        ModelEvalMetrics(
            {"accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=10)},
            select=lambda outputs, batch: (outputs["logits"], batch["labels"]),
        )

    They are in the evaluation's record under ``<set>_<name>``: ``eval_accuracy``; a metric with several values has an
    entry for each, ``eval_<name>_<value>``. They cover all ranks, without padding, and data that several ranks read
    once.

    Args:
        metrics: metrics by name: of torchmetrics, or objects with ``update``, ``compute`` and ``reset`` whose
            ``compute`` returns the same value on all ranks.
        select: (outputs, batch) → arguments of the metrics' ``update``. Outputs contain ``"loss"`` and what else the
            model returned.
        name: the callback's key; None: the class's name. Two callbacks, each with a ``select``, need two names.
    """

    def __init__(
        self, metrics: Mapping[str, Any], select: Callable[[Any, Any], tuple[Any, ...]], *, name: str | None = None
    ) -> None:
        self.name = name
        for name, metric in mapping("ModelEvalMetrics", "metrics", metrics).items():
            missing = [needed for needed in ("update", "compute", "reset") if not hasattr(metric, needed)]
            if missing or isinstance(metric, type):
                raise ConfigurationError(
                    f"ModelEvalMetrics: metrics[{name!r}]={metric!r} is not a metric; needs {missing or 'an instance'}"
                )
        if not callable(select):
            raise ConfigurationError(f"ModelEvalMetrics: select={select!r}; needs a function of (outputs, batch)")
        self._metrics = dict(metrics)
        self._select = select
        self._prefix = "eval"
        self._measuring = False

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        self._prefix = "eval" if ctx.name == "eval" else f"eval_{ctx.name}"
        self._measuring = True
        device = device_of(ctx.model)
        for metric in self._metrics.values():
            metric.reset()
            if isinstance(metric, nn.Module):
                metric.to(device)

    def on_prediction_step(self, ctx: contexts.PredictionStepContext) -> None:
        if not self._measuring:
            return
        selected = self._select(ctx.outputs, ctx.batch)
        for metric in self._metrics.values():
            if ctx.samples and ctx.layout.is_primary:
                metric.update(*selected)
            else:
                _update_without_rows(metric, selected)

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "eval" or not self._measuring:
            return
        self._measuring = False
        for name, metric in self._metrics.items():
            _give_scalars_a_row(metric)
            ctx.logs |= _entries(f"{self._prefix}_{name}", metric.compute())
            metric.reset()


# torchmetrics gathers a list state tensor by tensor, after concatenating states that are reduced by concatenation. It
# treats an empty list as fp32 of one dimension, and gathers a single scalar differently from rows. So each rank needs
# tensors of the same dtype and dimensions in its lists; otherwise the ranks' collectives do not match.


def _update_without_rows(metric: Any, batch: tuple[Any, ...]) -> None:
    """Update a metric of torchmetrics with padding: append tensors without rows to its lists, keep other states."""
    inner = _inner_metrics(metric)
    before = [{name: _copied(getattr(each, name)) for name in each._reductions} for each in inner]
    if inner:
        metric.update(*batch)
    for each, states in zip(inner, before, strict=True):
        for name, state in states.items():
            if isinstance(state, list):
                added = getattr(each, name)[len(state) :]
                state += [_with_rows(tensor)[:0] for tensor in added if isinstance(tensor, Tensor)]
            setattr(each, name, state)


def _copied(state: list[Tensor] | Tensor) -> list[Tensor] | Tensor:
    return list(state) if isinstance(state, list) else state.clone()  # an update may change it in place


def _give_scalars_a_row(metric: Any) -> None:
    for each in _inner_metrics(metric):
        for name, reduction in each._reductions.items():
            state = getattr(each, name)
            if isinstance(state, list) and getattr(reduction, "__name__", "") == "dim_zero_cat":
                setattr(each, name, [_with_rows(tensor) for tensor in state])


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def _inner_metrics(metric: Any) -> list[Any]:
    """Return the metrics of torchmetrics inside: itself, those of a collection, those that it wraps."""
    return [each for each in metric.modules() if hasattr(each, "add_state")] if isinstance(metric, nn.Module) else []


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a metric's value as entries of a record: one for each value of a mapping."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _entries(f"{name}_{key}", each)
    else:
        yield name, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
