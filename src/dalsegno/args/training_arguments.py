"""TrainingArguments: all settings of a run, with Hugging Face's names where it has them."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from dalsegno.distributed import modes
from dalsegno.errors import ConfigurationError, UnknownName, expect_known
from dalsegno.policies.recovery import RecoveryPolicy, recovery_of
from dalsegno.policies.retention import Best, Latest, Retention, is_better_higher, retention_of
from dalsegno.policies.triggers import (
    Every,
    InMemory,
    OnBest,
    SaveTrigger,
    StepSchedule,
    StepValues,
    in_memory,
    memory_trigger,
    save_trigger,
)
from dalsegno.stateful.annotations import ConstructorSignature
from dalsegno.system.tracebacks import short_traceback
from dalsegno.system.urls import cache_dir, is_mangled_url, is_url

from .checks import Count, Decay, Limit, NotNegative, Positive, Share, check_each, convert_named
from .other_names import answers

Strategy = Literal["no", "steps", "epoch"]

_AS_TEXT = (
    *("output_dir", "local_dir", "save", "save_in_memory", "save_pretrained", "keep"),
    *("gradient_accumulation_schedule", "sequence_length_schedule", "recovery"),
)


@dataclass
class TrainingArguments:
    """The settings of one run. A run is identified by its ``output_dir``.

    Raises:
        UnknownName: for an unknown argument; the message suggests the nearest known one.
        ConfigurationError: for a value that cannot work; the message lists the allowed values.
    """

    output_dir: str | Path
    """Location of checkpoints, logs and ``run.json``: a folder, or a URL such as ``s3://bucket/run``. Using it again
    resumes that run. A relative path is made absolute here, so that a later ``os.chdir`` does not move the run."""
    local_dir: str | Path | None = None
    """If ``output_dir`` is a URL: the local folder to which everything is written first. None: one below
    ``~/.cache/dalsegno``."""

    max_steps: Limit = -1
    """Optimizer steps over all legs. Overrides ``num_train_epochs``; -1: use that one."""
    num_train_epochs: NotNegative = 3.0
    """Passes over the data, if ``max_steps`` is -1."""
    max_seconds: float | None = None
    """Time limit of a leg, in seconds: it saves and ends after the step in which it is reached. None: no limit."""
    requeue: bool = False
    """Requeue the run's Slurm job after a stop by a signal or a clock. Outside of Slurm: no effect, and a warning."""
    per_device_train_batch_size: Positive = 8
    """Samples per micro-batch and rank."""
    per_device_eval_batch_size: Positive = 8
    """Samples per evaluation batch and rank."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches per step. The remainder at the end of an epoch is a smaller step."""
    gradient_accumulation_schedule: StepValues | None = None
    """Micro-batches per step, instead, by the number of finished steps from which they apply: ``{0: 1, 1000: 2}``, or
    that as text. None: the same number all along."""
    sequence_length_schedule: StepValues | None = None
    """Tokens to which sequences are cut in training, in the same notation: ``{0: 512, 2000: 1024}``. None: not cut."""

    optim: str = "adamw"
    """Optimizer, unless one is passed to the trainer: ``adamw``, ``adamw_fused``, ``adafactor``, ``sgd``, ``muon``
    (with AdamW for what is not a matrix in the model's blocks); torch's ``adadelta``, ``adagrad``, ``adam``,
    ``adamax``, ``asgd``, ``nadam``, ``radam``, ``rmsprop``; torchao's ``adamw_8bit``, ``adamw_4bit``, ``adamw_fp8``,
    whose state is smaller; or the name of a class, ``my_package:MyOptimizer``."""
    optim_args: dict[str, Any] | None = None
    """Further arguments of the optimizer: ``{"momentum": 0.9}``. For ``muon`` also ``matrices``, names of those that it
    updates: ``["layers.*"]``."""
    learning_rate: NotNegative = 5e-5
    """Peak learning rate."""
    weight_decay: NotNegative = 0.0
    """Weight decay of matrices; vectors (norms, biases) have none."""
    adam_beta1: Decay = 0.9
    """Beta1 of AdamW: decay of the gradients' average."""
    adam_beta2: Decay = 0.999
    """Beta2 of AdamW: decay of the squared gradients' average."""
    adam_epsilon: NotNegative = 1e-8
    """Epsilon of AdamW, which keeps the division finite."""
    lr_scheduler_type: str = "linear"
    """Schedule after warm-up: ``linear``, ``cosine`` (also ``cosine_with_min_lr``), ``cosine_with_restarts`` or
    ``polynomial`` down to ``min_lr`` at ``max_steps``; ``wsd``: constant, then linear (``warmup_stable_decay``: a
    cosine) down to ``min_lr`` in the last ``decay_ratio`` of the steps; ``inverse_sqrt``, not below ``min_lr``; or
    ``constant`` (also ``constant_with_warmup``)."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Arguments of the schedule: ``num_cycles`` (1) of ``cosine_with_restarts``, ``power`` (1.0) of ``polynomial``,
    ``timescale`` (the warm-up, or 10,000 steps) of ``inverse_sqrt``; ``num_decay_steps``, instead of ``decay_ratio``,
    and ``decay_type`` (``linear``, ``cosine``, ``1-sqrt``) of ``wsd`` and ``warmup_stable_decay``."""
    min_lr: NotNegative = 0.0
    """Learning rate at which the schedule ends."""
    decay_ratio: Share = 0.1
    """Fraction of the run's steps in which ``wsd`` decays."""
    warmup_steps: Count = 0
    """Steps during which the learning rate rises linearly from zero."""
    warmup_ratio: Share = 0.0
    """The same as a fraction of the run's steps, if ``warmup_steps`` is 0."""
    max_grad_norm: NotNegative = 1.0
    """Total L2 norm to which gradients are clipped; 0: no clipping."""

    bf16: bool = False
    """Run the forward pass under bfloat16 autocast. Under FSDP, also gather the parameters in bfloat16, and reduce the
    gradients in float32."""
    fp16: bool = False
    """Run the forward pass under float16 autocast, with a gradient scaler."""
    fuse_optim_with_backward: bool = False
    """Update each parameter once its gradient is complete, then free the gradient: saves the memory of all gradients.
    Needs ``max_grad_norm=0``."""
    torch_compile: bool = False
    """Compile the model in place, so that parameter names stay the same."""
    torch_compile_backend: str = "inductor"
    """Backend of ``torch.compile``."""
    torch_compile_mode: str | None = None
    """Mode of ``torch.compile``, such as ``reduce-overhead`` or ``max-autotune``."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the model's blocks for the backward pass, and compute the rest again: less memory, about
    a third more time."""
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    """Arguments of ``torch.utils.checkpoint.checkpoint``; its ``use_reentrant`` is False unless set here."""
    parallel: modes.Setting = "auto"
    """Parallel mode: ``none``, ``ddp``, ``fsdp`` (``fully_shard``), or ``auto``: DDP under torchrun; or ``FSDP(…)``,
    ``HSDP(replicate=2)``, ``TensorParallel(plan, size)``, ``Pipeline(stages)``, a list, or ``Parallelized(mesh)``. A
    single rank always has the whole model; all but ``auto`` and ``none`` require torchrun even then."""
    use_cpu: bool = False
    """Train on the CPU even if PyTorch finds an accelerator (CUDA, ROCm, MPS, XPU), which is used by default."""

    logging_strategy: Strategy = "steps"
    """``steps``, ``epoch`` (at the end of each epoch) or ``no``."""
    logging_steps: Count = 10
    """Steps between records; 0: never."""
    logging_first_step: bool = False
    """Also log the first step."""
    eval_strategy: Strategy = "steps"
    """Like ``logging_strategy``."""
    eval_steps: Count = 500
    """Steps between evaluations; 0: never."""
    eval_on_save: bool = False
    """Evaluate before each checkpoint whose step is not evaluated yet; not before one that only a stop saves."""
    save_strategy: Strategy = "steps"
    """Like ``logging_strategy``. Unless it is ``no``, the end of training saves too."""
    save_steps: Count = 500
    """Steps between checkpoints; 0: never, not even at the end."""
    save: SaveTrigger | str | Sequence[SaveTrigger | str] | None = None
    """When to save, instead of the two above: ``Every(steps=500) | Every(minutes=30)``, or that as text; the end of
    training saves too."""
    save_total_limit: int | None = None
    """Number of checkpoints to keep: the newest ones, plus the best one. None: all."""
    keep: Retention | str | Sequence[Retention | str] | None = None
    """Which checkpoints to keep, instead: ``Latest(3) | Best(2) | EveryNth(10_000) | Steps(1, 2, 4)``, or that as
    text. None: all."""

    save_in_background: bool = True
    """Continue training while a checkpoint is written; needs memory for a copy of the state. False: wait for it."""
    save_in_memory: SaveTrigger | InMemory | str | None = None
    """When to also save into shared memory, which outlives a crash of the process: ``Every(steps=10)`` or, with copies
    that outlive a lost host, ``InMemory(steps=10, copies=1)``; or that as text. None: never."""
    save_frozen: Literal["once", "never"] = "once"
    """``once``: parameters with ``requires_grad=False`` are written once, and linked by later checkpoints. ``never``:
    only their checksums are saved; a leg that resumes must build the model with the same values."""
    save_pretrained: SaveTrigger | str | Sequence[SaveTrigger | str] | bool = False
    """Make each checkpoint's directory one that ``from_pretrained`` loads, too: a model of transformers, or adapters of
    peft; with ``Every(epochs=1) | OnBest()`` only those and the last. Weights that a file of the checkpoint has whole
    take no further space."""
    max_failed_saves: Positive = 3
    """Number of consecutive failed saves (e.g. on a full disk) that raises an error; fewer are only logged."""

    on_resume: Literal["warn", "stop", "ignore"] = "warn"
    """If the steps that a resumed leg repeats are not those of the leg before, bit for bit and without a known reason:
    ``warn``, ``stop`` (without a checkpoint; exit status 1), or ``ignore``, which only records it in ``run.json``."""
    load_best_model_at_end: bool = False
    """Save at each new best metric, and load the best weights at the end."""
    metric_for_best_model: str | None = None
    """Name of an evaluation metric, with or without ``eval_``. None: the evaluation loss."""
    greater_is_better: bool | None = None
    """Whether a higher metric is better. None: by its name; a loss, an error, a perplexity … is to fall."""

    seed: int = 42
    """Seed of all random generators, and of shuffling unless ``data_seed`` is given."""
    data_seed: int | None = None
    """Seed of shuffling only."""
    dataloader_num_workers: Count = 0
    """Worker processes per rank that load data ahead."""
    dataloader_drop_last: bool = False
    """Drop the samples that do not fill a micro-batch on all ranks."""
    dataloader_pin_memory: bool = True
    """Pin memory; has no effect without a GPU."""
    dataloader_prefetch_factor: int | None = None
    """Micro-batches that each worker loads ahead; None: torch's default."""
    dataloader_persistent_workers: bool = False
    """Keep workers alive between epochs."""

    disable_tqdm: bool | None = None
    """True: lines instead of progress bars. None: bars on a terminal and in a notebook."""
    take_over_lock: bool = False
    """Take ``output_dir`` from a process on another host or in another container at once; only if it is dead."""
    run_name: str | None = None
    """Name of the run for humans; some callbacks show it."""
    report_to: str | Sequence[str] = "none"
    """Trackers to write to, one or several: ``tensorboard``, ``wandb``, ``mlflow``, or ``none``. Each has its
    logger's defaults, unless that logger is among the callbacks."""
    recovery: RecoveryPolicy | str | None = None
    """What the run does when a callback requests a rollback to a checkpoint: ``RecoveryPolicy(margin=100, budget=3)``,
    or that as text. It then also saves a checkpoint at step 0. None: it cannot go back."""

    __signature__ = ConstructorSignature()
    _in_leg = 0  # id of the settings while a leg has them, so that a copy may be changed

    def __new__(cls, *args: Any, **named: Any) -> TrainingArguments:
        known = [field.name for field in fields(cls)]
        if not {*named} <= {*known}:
            expect_known(f"argument of {cls.__name__}", named, known, answers(known, "Trainer"))
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        is_known = hasattr(type(self), name) or name in self.__dataclass_fields__
        if not is_known and type(self) is TrainingArguments:  # a class derived from it may have attributes of its own
            known = [field.name for field in fields(self)]
            raise UnknownName(f"setting of {type(self).__name__}", name, known, answers(known, "Trainer"))
        if name in self.__dataclass_fields__ and self._in_leg == id(self):
            raise ConfigurationError(
                f"args.{name} = {value!r}: settings are fixed while a run trains: no checkpoint contains a change. "
                "ctx.control requests a record, evaluation, save or stop; the command set changes logging_steps, "
                "eval_steps, save_steps, max_steps and learning_rate, in later legs too: on rank 0, "
                "trainer.commands.submit('set', {'max_steps': 100}, by='me'). Any other is for the script's next leg"
            )
        super().__setattr__(name, value)

    @short_traceback
    def __post_init__(self) -> None:
        check_each(self, TrainingArguments)
        if not str(self.output_dir):
            raise ConfigurationError("output_dir=''; name the run's folder, or '.' for the current one")
        if not is_url(self.output_dir):
            if self.local_dir is not None:
                raise ConfigurationError(
                    f"local_dir={str(self.local_dir)!r}: output_dir={str(self.output_dir)!r} is not a URL; leave "
                    "local_dir out"
                )
            if is_mangled_url(self.output_dir):
                raise ConfigurationError(f"output_dir={str(self.output_dir)!r}: pass a URL as str, not as Path")
            self.output_dir = Path(self.output_dir).expanduser().absolute()
        elif self.local_dir is not None:
            self.local_dir = Path(self.local_dir).expanduser().absolute()
        self.parallel = modes.checked(self.parallel)
        self._check_optimization()
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs == 0):
            raise ConfigurationError("max_steps=0 or num_train_epochs=0 trains nothing; set max_steps=-1 to use epochs")
        self._check_policies()
        self._check_schedules()
        self._check_recovery()
        if self.load_best_model_at_end and not ((self.evaluation or self.eval_on_save) and self.saving):
            raise ConfigurationError(
                "load_best_model_at_end=True needs evaluations and checkpoints; see eval_steps, save_steps"
            )

    def _check_optimization(self) -> None:
        if self.min_lr > self.learning_rate:
            raise ConfigurationError(
                f"min_lr={self.min_lr:g} is over learning_rate={self.learning_rate:g}, the highest; set it lower"
            )
        if not self.torch_compile and self.torch_compile_mode is not None:
            raise ConfigurationError(f"torch_compile_mode={self.torch_compile_mode!r} needs torch_compile=True")
        if not self.gradient_checkpointing and self.gradient_checkpointing_kwargs is not None:
            raise ConfigurationError("gradient_checkpointing_kwargs= needs gradient_checkpointing=True")
        if self.bf16 and self.fp16:
            raise ConfigurationError("bf16=True and fp16=True; choose one of them")
        if self.fuse_optim_with_backward and self.max_grad_norm:
            raise ConfigurationError(
                f"fuse_optim_with_backward=True and max_grad_norm={self.max_grad_norm:g}: the total norm is only known "
                "after the weights are updated; set max_grad_norm=0 (no clipping)"
            )
        if self.fuse_optim_with_backward and self.fp16:
            raise ConfigurationError(
                "fuse_optim_with_backward=True and fp16=True: whether to skip a step is only known after the weights "
                "are updated; use bf16=True"
            )

    def _check_policies(self) -> None:
        if self.save is not None:
            self.save = convert_named("save", self.save, save_trigger)
            if (self.save_steps, self.save_strategy) != (_default("save_steps"), _default("save_strategy")):
                raise ConfigurationError(f"save={self.save!r}, and save_steps= or save_strategy= too; give only one")
            if self.save.on_best and not self.evaluation:
                raise ConfigurationError(f"save={self.save!r} needs evaluations; see eval_steps")
        if self.save_in_memory is not None:
            self.save_in_memory = convert_named("save_in_memory", self.save_in_memory, memory_trigger)
        if self.saving_in_memory and not self.saving:
            raise ConfigurationError(
                f"save_in_memory={self.save_in_memory!r} needs checkpoints on disk too, for a lost host; see save_steps"
            )
        if not isinstance(self.save_pretrained, bool):
            self.save_pretrained = convert_named("save_pretrained", self.save_pretrained, save_trigger)
        if self.saving_pretrained and not self.saving:
            raise ConfigurationError(f"save_pretrained={self.save_pretrained!r} needs checkpoints; see save_steps")
        if self.saving_pretrained.interval_s < math.inf:
            raise ConfigurationError(f"save_pretrained={self.save_pretrained!r}: choose by steps, epochs or OnBest()")
        if self.keep is not None:
            self.keep = convert_named("keep", self.keep, retention_of)
            if self.save_total_limit is not None:
                raise ConfigurationError(f"keep={self.keep!r}, and save_total_limit= too; give only one")

    def _check_recovery(self) -> None:
        self.recovery = convert_named("recovery", self.recovery, recovery_of)
        if self.recovery is None:
            return
        if not self.saving:
            raise ConfigurationError(f"recovery={self.recovery!r} needs checkpoints; see save_steps")
        if self.url is not None:
            raise ConfigurationError(
                f"recovery={self.recovery!r} and output_dir={self.url!r}: another host that resumes the run fetches "
                "its newest checkpoint only, and could not go back to an older one; use a folder"
            )
        if self.fuse_optim_with_backward and self.recovery.lr_factor != 1:
            raise ConfigurationError(
                f"recovery={self.recovery!r} and fuse_optim_with_backward=True: the weights are updated during the "
                "backward pass, where no factor applies; leave lr_factor out"
            )

    def _check_schedules(self) -> None:
        if self.sequence_lengths is not None:
            self.sequence_length_schedule = self.sequence_lengths.values
            if self.torch_compile:
                raise ConfigurationError(
                    "sequence_length_schedule= and torch_compile=True: compiled kernels depend on the lengths that a "
                    "process has seen, so a resumed run would not be exact; use one of the two"
                )
        if self.gradient_accumulation_schedule is None:
            return
        self.gradient_accumulation_schedule = self.accumulation.values
        if self.gradient_accumulation_steps != _default("gradient_accumulation_steps"):
            raise ConfigurationError(
                f"gradient_accumulation_schedule={self.gradient_accumulation_schedule!r}, and "
                "gradient_accumulation_steps= too; give only one"
            )

    @property
    def accumulation(self) -> StepSchedule:
        """Micro-batches of each step, from ``gradient_accumulation_schedule`` or ``gradient_accumulation_steps``."""
        if self.gradient_accumulation_schedule is None:
            return StepSchedule("gradient_accumulation_steps", {0: self.gradient_accumulation_steps})
        return StepSchedule("gradient_accumulation_schedule", self.gradient_accumulation_schedule)

    @property
    def sequence_lengths(self) -> StepSchedule | None:
        """Tokens to which each step's sequences are cut, from ``sequence_length_schedule``; None: not cut."""
        if self.sequence_length_schedule is None:
            return None
        return StepSchedule("sequence_length_schedule", self.sequence_length_schedule)

    @property
    def directory(self) -> Path:
        """Local folder of the run: ``output_dir``; for a URL, ``local_dir``."""
        if self.url is None:
            return Path(self.output_dir)
        return cache_dir(self.url) if self.local_dir is None else Path(self.local_dir)

    @property
    def url(self) -> str | None:
        """URL of the run, if ``output_dir`` is one."""
        return str(self.output_dir) if is_url(self.output_dir) else None

    @property
    def shuffle_seed(self) -> int:
        """Seed of the data order."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def logging(self) -> Every:
        return _every(self.logging_strategy, self.logging_steps)

    @property
    def evaluation(self) -> Every:
        return _every(self.eval_strategy, self.eval_steps)

    @property
    def saving(self) -> SaveTrigger:
        """When to save, from ``save`` or the other settings; false if never."""
        saving = _every(self.save_strategy, self.save_steps) if self.save is None else save_trigger(self.save)
        return saving | OnBest() if saving and self.load_best_model_at_end else saving

    @property
    def saving_in_memory(self) -> InMemory:
        """When to save into shared memory; false if never."""
        return InMemory() if self.save_in_memory is None else in_memory(memory_trigger(self.save_in_memory))

    @property
    def saving_pretrained(self) -> SaveTrigger:
        """Which checkpoints ``from_pretrained`` loads, too; false if none."""
        given = self.save_pretrained
        return Every(steps=int(given)) if isinstance(given, bool) else save_trigger(given)

    @property
    def keeping(self) -> Retention | None:
        """Which checkpoints to keep, from ``keep`` or the other settings; None: all."""
        if self.keep is not None:
            keeping = retention_of(self.keep)
        elif self.save_total_limit is not None:
            keeping = Latest(self.save_total_limit) | Best()
        else:
            return None
        keeping = keeping.with_metric(self.best_metric_name, greater=self.best_is_greater)
        if self.load_best_model_at_end:
            keeping |= Best().with_metric(self.best_metric_name, greater=self.best_is_greater)
        recovery = recovery_of(self.recovery)
        return keeping if recovery is None else keeping | recovery.keeping

    @property
    def best_metric_name(self) -> str:
        """Name, in the evaluation's metrics, of the metric that selects the best checkpoint."""
        name = self.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def best_is_greater(self) -> bool:
        if self.greater_is_better is not None:
            return self.greater_is_better
        return is_better_higher(self.best_metric_name)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a JSON-serializable dict."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        texts = {name: str(values[name]) for name in _AS_TEXT if not isinstance(values[name], bool | None)}
        return deepcopy(values | texts | {"parallel": modes.text_of(self.parallel)})


def described_settings() -> list[tuple[str, str | None, str]]:
    """Name, default as it is written (None: required), and meaning of each setting, from this file's source."""
    tree = ast.parse(Path(__file__).read_text())
    (settings,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    return [
        (
            ast.unparse(field.target),
            None if field.value is None else ast.unparse(field.value),
            " ".join(str(text.value.value).split()),
        )
        for field, text in pairwise(settings.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    ]


class _Documentation:
    """``__doc__`` of the class with each setting's sentence, for notebooks; the source is read when it is asked for."""

    def __init__(self, text: str) -> None:
        self._text = inspect.cleandoc(text)

    def __get__(self, instance: object, owner: type) -> str:
        settings = [f"    {name}: {meaning}" for name, _, meaning in described_settings()]
        return "\n".join([self._text, "", "Args:", *settings])


setattr(TrainingArguments, "__doc__", _Documentation(TrainingArguments.__doc__ or ""))  # noqa: B010


def _default(name: str) -> object:
    return getattr(TrainingArguments, name)


def _every(strategy: Strategy, steps: int) -> Every:
    return {"no": Every(), "steps": Every(steps=steps), "epoch": Every(epochs=1)}[strategy]
