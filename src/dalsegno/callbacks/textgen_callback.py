"""TextgenCallback: generates text from prompts at evaluations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from tqdm import tqdm

from dalsegno.distributed.precision import autocast_dtype
from dalsegno.distributed.rng import TEXT, mix
from dalsegno.errors import ConfigurationError, NotFound
from dalsegno.events.contexts import EvaluateContext, TrainBeginContext, TrainEndContext
from dalsegno.logs.rewind import PositionState
from dalsegno.system.extras import how_to_install

from .argument_checks import flag, number, whole, writer
from .record_callback import RecordCallback
from .rewound_writer import check_rewound
from .text_generation import TextGenerator


class TextgenState(TypedDict):
    log: PositionState | None
    last_step: int | None


class TextgenCallback(RecordCallback):
    """Generates text from prompts at evaluations.

    The texts are printed, written into ``logs/texts.jsonl``, and to TensorBoard if there is a writer. Models of
    transformers generate by their ``generate``; other models by :class:`dalsegno.callbacks.text_generation.Sampler`,
    which needs their logits. The tokenizer is the trainer's ``processing_class``.

    Random numbers are drawn from a seed derived from the step, so a resumed run generates the same texts as an
    uninterrupted one, and the training's generators are not used. All ranks take part, as a sharded model or a pipeline
    requires; rank 0 writes. Before training, one token is generated after the longest possible text, so that errors
    occur early.

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
        self._board = writer("TextgenCallback", summary_writer, "add_text")
        self._prompts = _texts(prompts)
        self._settings = _checked(generation_config)
        steps = 1 if generation_steps is None else generation_steps
        self._steps_apart = whole("TextgenCallback", "generation_steps", steps)
        self._most = whole("TextgenCallback", "max_new_tokens", max_new_tokens)
        self._generator: TextGenerator | None = None  # while training runs
        self._last_step: int | None = None

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        check_rewound("TextgenCallback", self._board)
        super().on_train_begin(ctx)
        dtype = autocast_dtype(bf16=ctx.args.bf16, fp16=ctx.args.fp16)
        self._generator = TextGenerator(ctx.model, ctx.processing_class, self._settings, self._most, dtype)
        self._generator.dry_run(self._prompts)

    def on_evaluate(self, ctx: EvaluateContext) -> None:
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
            if self._board is not None:
                self._board.add_text(f"text/{index}", _as_code(whole_text), step)
            _say(f"{step:>9}  text: {_visible(whole_text)}")

    def on_train_end(self, ctx: TrainEndContext) -> None:
        super().on_train_end(ctx)
        self._generator = None

    def state_dict(self) -> TextgenState:
        return {"log": super().state_dict(), "last_step": self._last_step}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["log"])
        self._last_step = state["last_step"]


def _texts(given: Sequence[str] | str | Path) -> list[str]:
    """Raises ConfigurationError for anything but a list of strings; names the item that is not one."""
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


def _checked(settings: Any) -> Any:
    """Check the settings that mean the same for every model."""
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


def _as_code(text: str) -> str:
    """Format as a Markdown code block, which shows the text unchanged."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _say(text: str) -> None:
    """Print above a progress bar, if there is one; escape characters that the console's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stdout)
