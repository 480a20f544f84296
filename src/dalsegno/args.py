"""TrainingArguments: every setting of a run in one place, under Hugging Face's names where it has one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigurationError, UnknownName
from .policies.retention import Best, Latest, Retention, retention_of
from .policies.triggers import Every, OnBest, SaveTrigger, save_trigger
from .system.urls import cache_dir, is_mangled_url, is_url

Strategy = Literal["no", "steps", "epoch"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "parallel": ("auto", "none", "ddp", "fsdp"),
    "lr_scheduler_type": ("linear", "cosine", "constant"),
    "logging_strategy": ("no", "steps", "epoch"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch"),
}
_AT_LEAST: dict[str, float] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "warmup_steps": 0,
    "max_grad_norm": 0,
    "max_steps": -1,
    "num_train_epochs": 0,
    "logging_steps": 0,
    "eval_steps": 0,
    "save_steps": 0,
    "max_failed_saves": 1,
    "dataloader_num_workers": 0,
}

MEANT = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
}
"""Settings under the names that other libraries, or older versions of them, have for them."""


@dataclass
class TrainingArguments:
    """The settings of one run. A run *is* its ``output_dir``.

    Raises:
        UnknownName: for an argument that does not exist; the message names the nearest one that does.
        ConfigurationError: for a value that cannot work; the message says which are allowed.
    """

    output_dir: str | Path
    """Where checkpoints, logs and ``run.json`` live: a folder, or a URL such as ``s3://bucket/run``. The same again
    means: go on with that run. A relative path is made absolute here: a later ``os.chdir`` does not move the run."""
    local_dir: str | Path | None = None
    """Of an ``output_dir`` that is a URL: the folder here into which everything is written first. None: one below
    ``~/.cache/dalsegno``."""

    max_steps: int = -1
    """Optimizer steps in all, over every leg. It wins over ``num_train_epochs``; -1: that one counts."""
    num_train_epochs: float = 3.0
    """Passes over the data, where ``max_steps`` is -1."""
    max_seconds: float | None = None
    """A leg saves and ends at the end of the step in which it has lasted so long. None: as long as it takes."""
    per_device_train_batch_size: int = 8
    """Samples in a micro-batch, on each rank."""
    per_device_eval_batch_size: int = 8
    """Samples in an evaluation batch, on each rank."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in a step. What is left at an epoch's end is a (smaller) step of its own."""

    learning_rate: float = 5e-5
    """Of the default AdamW, at its highest."""
    weight_decay: float = 0.0
    """Of the default AdamW."""
    adam_beta1: float = 0.9
    """Of the default AdamW, like the next two."""
    adam_beta2: float = 0.999
    """Decay of the squared gradients' average."""
    adam_epsilon: float = 1e-8
    """Keeps the division by their root finite."""
    lr_scheduler_type: str = "linear"
    """After the warm-up: ``linear`` or ``cosine`` down to zero at ``max_steps``, or ``constant``."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from zero."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this total L2 norm; 0: not at all."""

    bf16: bool = False
    """Forward under bfloat16 autocast."""
    fp16: bool = False
    """Forward under float16 autocast, with a gradient scaler."""
    fuse_optim_with_backward: bool = False
    """Update each parameter as soon as its gradient is there, and free that at once: saves the memory of all gradients.
    Needs ``max_grad_norm=0``."""
    torch_compile: bool = False
    """Compile the model (in place, so that no name changes)."""
    torch_compile_backend: str = "inductor"
    """Of ``torch.compile``."""
    parallel: str = "auto"
    """How the model is spread over the ranks: ``none``, ``ddp``, ``fsdp`` (``fully_shard``), or ``auto``: DDP under
    torchrun. A single rank has the whole model in each case; ``ddp`` and ``fsdp`` want torchrun there, too."""
    use_cpu: bool = False
    """Train on the CPU even where there is a GPU."""

    logging_strategy: Strategy = "steps"
    """``steps``, ``epoch`` (at each epoch's end) or ``no``."""
    logging_steps: int = 10
    """Steps between two records; 0: never."""
    logging_first_step: bool = False
    """Log the very first step too."""
    eval_strategy: Strategy = "steps"
    """As ``logging_strategy``."""
    eval_steps: int = 500
    """Steps between two evaluations; 0: never."""
    save_strategy: Strategy = "steps"
    """As ``logging_strategy``. Unless it is ``no``, the end of training saves too."""
    save_steps: int = 500
    """Steps between two checkpoints; 0: never, not even at the end."""
    save: SaveTrigger | str | Sequence[SaveTrigger | str] | None = None
    """When to save, in place of these two: ``Every(steps=500) | Every(minutes=30)``, or as text; the end saves too."""
    save_total_limit: int | None = None
    """How many checkpoints to keep: the newest ones, and the best one beside them. None: all."""
    keep: Retention | str | Sequence[Retention | str] | None = None
    """Which to keep, in place of it: ``Latest(3) | Best(2) | EveryNth(10_000)``, or as text. None: all."""

    save_in_background: bool = True
    """Training goes on while a checkpoint is written; that takes memory for a copy of the state. False: it waits."""
    max_failed_saves: int = 3
    """So many saves in a row that do not get to the disk (it is full, say) are an error; fewer are only reported."""

    load_best_model_at_end: bool = False
    """Save at each new best metric, and end with that model's weights."""
    metric_for_best_model: str | None = None
    """A name among the evaluation's metrics, with or without ``eval_``. None: the evaluation loss."""
    greater_is_better: bool | None = None
    """None: yes, unless the metric's name ends in ``loss``."""

    seed: int = 42
    """Of every generator, and (unless ``data_seed`` is given) of the shuffling."""
    data_seed: int | None = None
    """Of the shuffling alone."""
    dataloader_num_workers: int = 0
    """Worker processes that read ahead, on each rank."""
    dataloader_drop_last: bool = False
    """Leave out what does not fill a micro-batch on all ranks."""
    dataloader_pin_memory: bool = True
    """Only where there is a GPU."""
    dataloader_prefetch_factor: int | None = None
    """Micro-batches that each worker reads ahead; None: torch's default."""
    dataloader_persistent_workers: bool = False
    """Keep the workers from one epoch to the next."""

    disable_tqdm: bool | None = None
    """True: no progress bars, lines instead. None: bars on a terminal and in a notebook."""
    take_over_lock: bool = False
    """Begin although a process of another host says in ``output_dir`` that it trains there. Only if it is dead."""
    run_name: str | None = None
    """For people, and for callbacks that show it."""

    def __new__(cls, *args: Any, **named: Any) -> TrainingArguments:
        known = [field.name for field in fields(cls)]
        for name in named:
            if name not in known:
                raise UnknownName(f"argument of {cls.__name__}", name, known, MEANT)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not is_url(self.output_dir):
            if self.local_dir is not None:
                raise ConfigurationError(
                    f"local_dir={str(self.local_dir)!r}: output_dir={str(self.output_dir)!r} is no URL, and needs none"
                )
            if is_mangled_url(self.output_dir):
                raise ConfigurationError(f"output_dir={str(self.output_dir)!r}: give a URL as text, not as a Path")
            self.output_dir = Path(self.output_dir).absolute()  # os.chdir() later does not move the run
        elif self.local_dir is not None:
            self.local_dir = Path(self.local_dir).absolute()
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigurationError(f"{name}={value!r}; allowed are {', '.join(map(repr, allowed))}")
        for name, least in _AT_LEAST.items():
            value, whole = getattr(self, name), isinstance(getattr(type(self), name), int)
            fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not (fits and least <= value < math.inf):
                kind = "whole number" if whole else "number"
                raise ConfigurationError(f"{name}={value!r}; needs a {kind} of at least {least:g}")
        if self.bf16 and self.fp16:
            raise ConfigurationError("bf16=True and fp16=True; choose one of them")
        if self.fuse_optim_with_backward:
            self._check_fused()
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs == 0):
            raise ConfigurationError("max_steps=0 or num_train_epochs=0 trains nothing; max_steps=-1 means: by epochs")
        if self.save_total_limit is not None and (type(self.save_total_limit) is not int or self.save_total_limit < 1):
            raise ConfigurationError(f"save_total_limit={self.save_total_limit!r}; needs at least 1, or None for all")
        seconds = self.max_seconds
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < math.inf):
            raise ConfigurationError(f"max_seconds={seconds!r}; needs a number over 0, or None for no limit")
        self._check_policies()
        if self.load_best_model_at_end and not (self.evaluation and self.saving):
            raise ConfigurationError(
                "load_best_model_at_end=True needs evaluations and checkpoints; see eval_steps, save_steps"
            )

    def _check_fused(self) -> None:
        if self.max_grad_norm:
            raise ConfigurationError(
                f"fuse_optim_with_backward=True and max_grad_norm={self.max_grad_norm:g}: the norm of all gradients is "
                "known when all are there, and by then the weights are updated; max_grad_norm=0 clips nothing"
            )
        if self.fp16:
            raise ConfigurationError(
                "fuse_optim_with_backward=True and fp16=True: whether a step is skipped is known when all gradients "
                "are there, and by then the weights are updated; use bf16=True"
            )

    def _check_policies(self) -> None:
        if self.save is not None:
            self.save = save_trigger(self.save)
            if (self.save_steps, self.save_strategy) != (_default("save_steps"), _default("save_strategy")):
                raise ConfigurationError(f"save={self.save!r}, and save_steps= or save_strategy= too; give one of them")
            if self.save.on_best and not self.evaluation:
                raise ConfigurationError(f"save={self.save!r} needs evaluations; see eval_steps")
        if self.keep is not None:
            self.keep = retention_of(self.keep)
            if self.save_total_limit is not None:
                raise ConfigurationError(f"keep={self.keep!r}, and save_total_limit= too; give one of them")

    @property
    def directory(self) -> Path:
        """Where the run lies here: ``output_dir``; of a URL, ``local_dir``."""
        if self.url is None:
            return Path(self.output_dir)
        return cache_dir(self.url) if self.local_dir is None else Path(self.local_dir)

    @property
    def url(self) -> str | None:
        """Where the run lies elsewhere, if ``output_dir`` is a URL."""
        return str(self.output_dir) if is_url(self.output_dir) else None

    @property
    def shuffle_seed(self) -> int:
        """Of the order of the data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def logging(self) -> Every:
        return _every(self.logging_strategy, self.logging_steps)

    @property
    def evaluation(self) -> Every:
        return _every(self.eval_strategy, self.eval_steps)

    @property
    def saving(self) -> SaveTrigger:
        """When to save, however it was given; false if never."""
        saving = _every(self.save_strategy, self.save_steps) if self.save is None else save_trigger(self.save)
        return saving | OnBest() if saving and self.load_best_model_at_end else saving

    @property
    def keeping(self) -> Retention | None:
        """Which checkpoints stay, however it was given; None: all."""
        if self.keep is not None:
            keeping = retention_of(self.keep)
        elif self.save_total_limit is not None:
            keeping = Latest(self.save_total_limit) | Best()
        else:
            return None
        keeping = keeping.with_metric(self.best_metric_name, greater=self.best_is_greater)
        if self.load_best_model_at_end:
            keeping |= Best().with_metric(self.best_metric_name, greater=self.best_is_greater)
        return keeping

    @property
    def best_metric_name(self) -> str:
        """The metric that decides which checkpoint is best, as it stands in the evaluation's metrics."""
        name = self.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def best_is_greater(self) -> bool:
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not self.best_metric_name.endswith("loss")

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict that JSON can hold."""
        texts = {name: getattr(self, name) for name in ("output_dir", "local_dir", "save", "keep")}
        return asdict(self) | {name: None if value is None else str(value) for name, value in texts.items()}


def _default(name: str) -> object:
    return getattr(TrainingArguments, name)


def _every(strategy: Strategy, steps: int) -> Every:
    return {"no": Every(), "steps": Every(steps=steps), "epoch": Every(epochs=1)}[strategy]
