"""Text generation: generate text from prompts during training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from dalsegno.distributed import collectives
from dalsegno.distributed.inference import inference
from dalsegno.distributed.rng import seeded_generators
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.distributed.stage_places import expect_whole, is_cut
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.system.extras import how_to_install

Ids = list[int]

Continue = Callable[[Sequence[Ids], int], list[Ids]]
"""(prompts, maximum tokens of each continuation) → continuations."""


class Tokenizer(Protocol):
    """Tokenizers of transformers, and most others, have these methods."""

    def encode(self, text: str) -> Any:
        """Return token ids, or an object with an attribute ``ids``."""

    def decode(self, ids: Ids) -> str: ...


class TextGenerator:
    """Continues prompts, by transformers' ``generate`` where the model has it, else by :class:`Sampler`.

    Collective: all ranks must call it with the same arguments, since a sharded model's forward pass needs all ranks.

    Args:
        settings: settings of transformers' GenerationConfig, or such a config; for other models, of :class:`Sampling`.
        most: maximum tokens of a continuation.
        dtype: dtype of autocast; None: no autocast.

    Raises:
        ConfigurationError: for an object that is not a tokenizer, or settings that do not suit the model.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, settings: Any, most: int, dtype: torch.dtype | None = None
    ) -> None:
        self._model = model
        self._tokenizer: Tokenizer = _checked(tokenizer)
        self._most = most
        self._dtype = dtype
        self._device = device_of(model)
        self._special = set(getattr(self._tokenizer, "all_special_ids", ()))
        if is_of_transformers(model):
            self._generate: Continue = _Generate(model, settings, self._device, self._tokenizer)
        else:
            end = getattr(self._tokenizer, "eos_token_id", None)
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
        with inference(self._model, _called(self._model)), seeded_generators(seed, self._device), eager, cast:
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
        whole, prompt = self._tokenizer.decode(head + shown), self._tokenizer.decode(head)
        return whole[len(prompt) :] if whole.startswith(prompt) else self._tokenizer.decode(shown)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether the model has transformers' ``generate``."""
    return getattr(model, "generation_config", None) is not None and callable(getattr(model, "generate", None))


def _called(model: Any) -> nn.Module:
    """Return the module whose forward generates: of a PEFT adapter, the model in it."""
    called: nn.Module = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    return called


def _checked(tokenizer: Any) -> Any:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a multimodal processor
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise ConfigurationError(
            f"processing_class={tokenizer!r}: to generate text, give the trainer a tokenizer, something with encode "
            f"and decode; for those of transformers: {how_to_install('text')}"
        )
    return tokenizer


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
        begins = 0 if self._model.config.is_encoder_decoder else width
        return [self._without_padding(row) for row in whole[:, begins:].tolist()]

    def _without_padding(self, row: Ids) -> Ids:
        while row and row[-1] == self._pad:
            row.pop()
        return row


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
        """
        Raises:
            ConfigurationError: for anything but a mapping, or None.
            UnknownName: for a setting of transformers only; the message names the nearest.
        """
        if not (settings is None or isinstance(settings, Mapping)):
            raise ConfigurationError(
                f"generation_config={type(settings).__name__}(…): the model has no generate of transformers; "
                "give a mapping, such as {'do_sample': True, 'temperature': 0.8}"
            )
        known = [each.name for each in fields(cls)]
        for name in settings or {}:
            if name not in known:
                raise UnknownName("generation_config of a model without transformers' generate:", name, known)
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
        for number in range(most):
            logits = self._logits(ids[:, : longest + number])[rows, lengths + number - 1]
            chosen = choose(logits.float(), self._sampling)
            collectives.broadcast_tensors([chosen])
            ids[rows, lengths + number] = chosen
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
            shape = (
                f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(returned).__name__
            )
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
