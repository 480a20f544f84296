"""TextgenCallback: generates text from prompts at evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from dalsegno.callbacks.argument_checks import flag, number, whole
from dalsegno.callbacks.loggers.json_logger import RecordCallback
from dalsegno.callbacks.loggers.tensorboard import check_rewound, checked_writer
from dalsegno.callbacks.printing import STDOUT
from dalsegno.distributed import collectives
from dalsegno.distributed.inference import inference
from dalsegno.distributed.parallel.base import autocast_dtype
from dalsegno.distributed.rng import TEXT, mix, seeded_generators
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.distributed.stage_places import expect_whole, is_cut
from dalsegno.errors import ConfigurationError, NotFound, expect_known
from dalsegno.events import contexts
from dalsegno.logs.rewind import Position
from dalsegno.system.imports import how_to_install


class TextgenState(TypedDict):
    log: Position | None
    last_step: int | None


class TextgenCallback(RecordCallback):
    """Generates text from prompts at evaluations.

    The texts are printed, written into ``logs/texts.jsonl``, and to TensorBoard if there is a writer. Models of
    transformers generate by their ``generate``; other models by :class:`Sampler`, which needs their logits. The
    tokenizer is the trainer's ``processing_class``. Random numbers are drawn from a seed derived from the step. All
    ranks take part, as a sharded model or a pipeline requires; rank 0 writes. Before training, one token is generated
    after the longest possible text, so that errors occur early.

    Args:
        summary_writer: gets the texts as ``text/0`` and so on: a :class:`ResumableSummaryWriter` that is also among the
            trainer's callbacks, or any object with torch's ``add_text``; None: no TensorBoard.
        prompts: required; beginnings of texts, or a YAML file with a list of them.
        generation_config: a mapping with settings of transformers' ``GenerationConfig``, such as ``{"do_sample": True,
            "temperature": 0.8, "top_p": 0.95}``, or such a config. Models without ``generate`` accept ``do_sample``,
            ``temperature``, ``top_k``, ``top_p``, ``max_length`` and ``eos_token_id``.
        generation_steps: minimum number of steps between evaluations with texts. None: every evaluation.
        max_new_tokens: maximum tokens of a continuation; overrides ``generation_config``.

    Raises:
        ConfigurationError: for an invalid value, or a YAML file where PyYAML is not installed.
        NotFound: if the file does not exist.
    """

    state_schema = TextgenState

    def __init__(
        self,
        summary_writer: Any = None,
        prompts: Sequence[str] | str | Path | None = None,
        generation_config: Any = None,
        generation_steps: int | None = None,
        max_new_tokens: int = 200,
    ) -> None:
        super().__init__("logs/texts.jsonl")
        if prompts is None:
            hint = "" if summary_writer is None else "; the first argument is the summary_writer"
            raise ConfigurationError(f"TextgenCallback: prompts is missing: TextgenCallback(prompts=[…]){hint}")
        self._board = checked_writer("TextgenCallback", summary_writer, "add_text")
        self._prompts = _texts(prompts)
        self._settings = _checked_settings(generation_config)
        steps = 1 if generation_steps is None else generation_steps
        self._steps_apart = whole("TextgenCallback", "generation_steps", steps)
        self._most = whole("TextgenCallback", "max_new_tokens", max_new_tokens)
        self._generator: TextGenerator | None = None  # while training runs
        self._last_step: int | None = None

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        check_rewound("TextgenCallback", self._board)
        super().on_train_begin(ctx)
        dtype = autocast_dtype(bf16=ctx.args.bf16, fp16=ctx.args.fp16)
        self._generator = TextGenerator(ctx.model, ctx.processing_class, self._settings, self._most, dtype)
        self._generator.dry_run(self._prompts)

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        step = ctx.state.global_step
        if self._generator is None or (self._last_step is not None and step - self._last_step < self._steps_apart):
            return  # too early, or another set of the same evaluation
        self._last_step = step
        continued = self._generator(self._prompts, mix(TEXT, ctx.args.seed, step))
        if not ctx.state.is_world_process_zero:
            return
        texts = [{"prompt": prompt, "text": text} for prompt, text in zip(self._prompts, continued, strict=True)]
        self.write(ctx, {"texts": texts})
        for index, text in enumerate(texts):
            whole_text = f"{text['prompt']}|{text['text']}"
            if self._board is not None:  # as a code block of Markdown, which shows the text unchanged
                self._board.add_text(f"text/{index}", "    " + whole_text.replace("\n", "\n    "), step)
            STDOUT.say(f"{step:>9}  text: {_visible(whole_text)}")

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        super().on_train_end(ctx)
        self._generator = None

    def state_dict(self) -> TextgenState:
        return {"log": super().state_dict(), "last_step": self._last_step}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["log"])
        self._last_step = state["last_step"]


def _texts(given: Sequence[str] | str | Path) -> list[str]:
    is_file = isinstance(given, (str, Path))
    source = f"TextgenCallback: prompts={str(given)!r}" if is_file else "TextgenCallback: prompts"
    texts = _read(Path(given), source) if isinstance(given, (str, Path)) else given
    if not isinstance(texts, Sequence) or isinstance(texts, (str, bytes)) or not texts:
        raise ConfigurationError(f"{source}: {texts!r}; needs a list of strings, or a YAML file that holds one")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise ConfigurationError(f"{source}[{index}]: {text!r}; needs a string" + ", in quotes" * is_file)
    return list(texts)


def _read(path: Path, source: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(f"{source}: YAML is read with PyYAML: {how_to_install('yaml')}") from None
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"{source}: no such file; pass a prompt itself in a list") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{source}: {error}") from error


def _checked_settings(settings: Any) -> Any:
    if settings is None or hasattr(settings, "to_diff_dict"):  # transformers' GenerationConfig, which checks itself
        return settings
    if not isinstance(settings, Mapping):
        raise ConfigurationError(f"TextgenCallback: generation_config={settings!r}; needs a mapping")
    owner = "TextgenCallback: generation_config"
    if "max_new_tokens" in settings:
        raise ConfigurationError(f"{owner} holds max_new_tokens; give it as TextgenCallback(max_new_tokens=…)")
    if "do_sample" in settings:
        flag(owner, "do_sample", settings["do_sample"])
    if "temperature" in settings:
        number(owner, "temperature", settings["temperature"], over=0)
    if "top_k" in settings:
        whole(owner, "top_k", settings["top_k"], least=0)
    if "top_p" in settings and number(owner, "top_p", settings["top_p"], over=0) > 1:
        raise ConfigurationError(f"{owner}: top_p={settings['top_p']!r}; needs a number over 0 and up to 1")
    return settings


def _visible(text: str) -> str:
    """Escape control characters, since a model may generate any, and indent further lines."""
    lines = ["".join(each if each.isprintable() else repr(each)[1:-1] for each in line) for line in text.split("\n")]
    return f"\n{' ' * 17}".join(lines)


Ids = list[int]

Continue = Callable[[Sequence[Ids], int], list[Ids]]
"""(prompts, maximum tokens of each continuation) → continuations."""


class TextGenerator:
    """Continues prompts, by transformers' ``generate`` where the model has it, else by :class:`Sampler`.

    Collective: all ranks must call it with the same arguments, since a sharded model's forward pass needs all ranks.
    ``settings`` are those of transformers' GenerationConfig, or such a config; for other models, of :class:`Sampling`.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, settings: Any, most: int, dtype: torch.dtype | None) -> None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a multimodal processor
        if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise ConfigurationError(
                f"processing_class={tokenizer!r}: to generate text, give the trainer a tokenizer, something with "
                f"encode and decode; for those of transformers: {how_to_install('text')}"
            )
        self._model: Any = model
        self._tokenizer = tokenizer
        self._most = most
        self._dtype = dtype
        self._device = device_of(model)
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        is_of_transformers = getattr(model, "generation_config", None) is not None
        if is_of_transformers and callable(getattr(model, "generate", None)):
            self._generate: Continue = _Generate(model, settings, self._device, tokenizer)
        else:
            end = getattr(tokenizer, "eos_token_id", None)
            self._generate = Sampler(model, Sampling.of(settings), self._device, end)

    def __call__(self, beginnings: Sequence[str], seed: int) -> list[str]:
        """Return the continuations. Draws from generators seeded with ``seed``; restores the training's generators."""
        encoded = [self._encode(text) for text in beginnings]
        with self._prepared(seed):
            continued = self._generate(encoded, self._most)
        return [self._decode(before, ids) for before, ids in zip(encoded, continued, strict=True)]

    def dry_run(self, beginnings: Sequence[str]) -> None:
        """Generate a single token at the end of the longest possible text, so that errors occur before training."""
        encoded = [ids + ids[-1:] * (self._most - 1) for ids in map(self._encode, beginnings)]
        try:
            with self._prepared(0):
                self._generate(encoded, 1)
        except Exception as error:
            error.add_note(f"generating text was tried once, with the longest text: {max(map(len, encoded))} tokens")
            raise

    @contextlib.contextmanager
    def _prepared(self, seed: int) -> Iterator[None]:
        eager = torch.compiler.set_stance("force_eager")  # else each new length is compiled
        cast = torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)
        called = self._model.get_base_model() if callable(getattr(self._model, "get_base_model", None)) else self._model
        with inference(self._model, called), seeded_generators(seed, self._device), eager, cast:
            yield

    def _encode(self, text: str) -> Ids:
        encoded = self._tokenizer.encode(text)
        ids = list(getattr(encoded, "ids", encoded))
        if not ids:
            raise ConfigurationError(f"the tokenizer makes no token of the prompt {text!r}")
        return ids

    def _decode(self, before: Ids, ids: Ids) -> str:
        """Return the text that ``ids`` add to ``before``; many tokenizers drop a leading space when decoding."""
        shown = [each for each in ids if each not in self._special]
        head = [each for each in before if each not in self._special]
        whole, prompt, alone = (str(self._tokenizer.decode(each)) for each in (head + shown, head, shown))
        return whole[len(prompt) :] if whole.startswith(prompt) else alone


class _Generate:
    """Generates with transformers: all texts in one batch, padded on the left."""

    def __init__(self, model: Any, settings: Any, device: torch.device, tokenizer: Any) -> None:
        self._model = model
        is_plain = settings is None or isinstance(settings, Mapping)
        self._settings = dict(settings or {}) if is_plain else {"generation_config": settings}
        if is_cut(model):
            if model.config.is_encoder_decoder:
                expect_whole(model, "text generation by an encoder and a decoder", "where no rank has both")
            self._settings["use_cache"] = False  # a stage cannot tell a cache's length without the first layer
        self._device = device
        names = ("pad_token_id", "eos_token_id")
        self._pad = next((pad for name in names if (pad := getattr(tokenizer, name, None)) is not None), None)
        if "generate" not in vars(model):
            register_fsdp_forward_method(model, "generate")  # a PEFT adapter's generate bypasses the root's forward

    def __call__(self, beginnings: Sequence[Ids], most: int) -> list[Ids]:
        width, pad = max(map(len, beginnings)), self._pad or 0
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in beginnings], device=self._device)
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in beginnings], device=self._device)
        whole = self._model.generate(
            input_ids=ids,
            attention_mask=seen,
            max_new_tokens=most,
            pad_token_id=pad,
            synced_gpus=collectives.initialized(),  # a rank that has finished continues with the others
            **self._settings,
        )
        rows: list[Ids] = whole[:, 0 if self._model.config.is_encoder_decoder else width :].tolist()
        for row in rows:
            while row and row[-1] == self._pad:
                row.pop()
        return rows


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for choosing the next token, with names and meanings of transformers' GenerationConfig."""

    do_sample: bool = False
    """False: always the likeliest token."""
    temperature: float = 1.0
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    max_length: int | None = None
    """Maximum tokens of prompt and continuation together; for models with limited positions."""
    eos_token_id: int | Sequence[int] | None = None
    """Tokens that end a text; None: the tokenizer's."""

    @classmethod
    def of(cls, settings: Any) -> Self:
        if not (settings is None or isinstance(settings, Mapping)):
            raise ConfigurationError(
                f"generation_config={type(settings).__name__}(…): the model has no generate of transformers; "
                "give a mapping, such as {'do_sample': True, 'temperature': 0.8}"
            )
        known = [each.name for each in fields(cls)]
        expect_known("generation_config of a model without transformers' generate:", settings or {}, known)
        return cls(**(settings or {}))


class Sampler:
    """Generates token by token with any causal model that is called with ids and returns logits.

    ids are (texts, length), int64, padded on the right, where a causal model ignores the padding; logits are (texts,
    length, vocabulary): the return value, its ``.logits`` or its ``["logits"]``. Each token costs a forward pass over
    the whole text. Rank 0 chooses for all ranks, so that all generate equally many tokens.
    """

    def __init__(self, model: nn.Module, sampling: Sampling, device: torch.device, end: int | None) -> None:
        self._model = model
        self._sampling = sampling
        self._device = device
        given = sampling.eos_token_id if sampling.eos_token_id is not None else end
        ends = [] if given is None else [given] if isinstance(given, int) else list(given)
        self._ends = torch.tensor(ends, dtype=torch.long, device=device)

    def __call__(self, beginnings: Sequence[Ids], most: int) -> list[Ids]:
        rows = torch.arange(len(beginnings), device=self._device)
        lengths = torch.tensor([len(ids) for ids in beginnings], device=self._device)
        longest = max(map(len, beginnings))
        if self._sampling.max_length is not None:
            most = min(most, self._sampling.max_length - longest)
        ids = torch.zeros(len(beginnings), longest + max(most, 0), dtype=torch.long, device=self._device)
        for row, beginning in enumerate(beginnings):
            ids[row, : len(beginning)] = torch.tensor(beginning)
        has_ended = torch.zeros(len(beginnings), dtype=torch.bool, device=self._device)
        counts = torch.zeros_like(lengths)
        for done in range(most):
            logits = self._logits(ids[:, : longest + done])[rows, lengths + done - 1]
            chosen = choose(logits.float(), self._sampling)
            collectives.broadcast_tensors([chosen])
            ids[rows, lengths + done] = chosen
            has_ended |= torch.isin(chosen, self._ends)
            counts += ~has_ended
            if has_ended.all():
                break
        return [
            row[length : length + count]
            for row, length, count in zip(ids.tolist(), lengths.tolist(), counts.tolist(), strict=True)
        ]

    def _logits(self, ids: Tensor) -> Tensor:
        returned = self._model(ids)
        logits = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", returned)
        if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape or logits.dim() != 3:
            kind = type(returned).__name__
            shape = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else kind
            raise ConfigurationError(
                f"to generate text, {type(self._model).__name__} must have transformers' generate, or return logits "
                f"when it is called with ids alone: (texts, length, vocabulary), as a tensor, as .logits or as "
                f'["logits"]; of ids {tuple(ids.shape)} it returns {shape}'
            )
        return logits


def choose(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the next token of each text: (texts,) from (texts, vocabulary), drawn with the global generator."""
    if not sampling.do_sample:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k:
        worst = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < worst, -torch.inf)
    ordered, order = logits.softmax(-1).sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    likely = ordered.masked_fill(before >= sampling.top_p, 0.0)  # always keeps the first
    return order.gather(-1, likely.multinomial(1)).squeeze(-1)
