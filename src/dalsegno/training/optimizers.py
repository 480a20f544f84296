"""The optimizer that TrainingArguments describe: chosen by name, with weight decay on matrices only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dalsegno.args import TrainingArguments
from dalsegno.args.checks import OPTIMIZERS
from dalsegno.config.registry import find_named
from dalsegno.distributed import collectives
from dalsegno.distributed.blocks import outermost_blocks
from dalsegno.distributed.sharded_tensors import named_parameters
from dalsegno.errors import ConfigurationError

logger = logging.getLogger("dalsegno")

_TAKE_ADAM_SETTINGS = {"adam", "adamax", "nadam", "radam", "muon"}
_TAKE_ADAM_SETTINGS |= {name for name in OPTIMIZERS if name.startswith("adamw")}

Groups = list[dict[str, Any]]


def takes_adam_settings(args: TrainingArguments) -> bool:
    """Whether ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon`` have an effect on the optimizer from ``args``."""
    return args.optim in _TAKE_ADAM_SETTINGS


def unwrapped_optimizer(optimizer: object) -> object:
    """Return the optimizer inside a wrapper that keeps nothing itself, as Accelerate's, whose hooks never run."""
    while isinstance(optimizer, Optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner.state is not getattr(optimizer, "state", None):
            break
        optimizer = inner
    return optimizer


def expect_optimizer(optimizer: object) -> Optimizer:
    """Return the optimizer, unwrapped. Raises ConfigurationError for an object that only behaves like one: its state
    cannot be saved."""
    optimizer = unwrapped_optimizer(optimizer)
    if isinstance(optimizer, type):
        raise ConfigurationError(
            f"optimizer: {optimizer.__name__} is a class; give an instance: {optimizer.__name__}(model.parameters(), …)"
        )
    if isinstance(optimizer, list | tuple):
        raise ConfigurationError(
            f"optimizer: a {type(optimizer).__name__}; give the optimizer and its schedule apart: optimizer=…, "
            "lr_scheduler=…. Only a loop of your own steps several: dalsegno.Run(optimizer=[…])"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"optimizer: a {type(optimizer).__name__} is not a torch.optim.Optimizer, so its state cannot be saved; "
            "derive it from Optimizer, with what it keeps in its self.state, its groups or its state_dict"
        )
    return optimizer


def expect_hooks(optimizer: Optimizer) -> None:
    """Raises ConfigurationError for an optimizer whose steps a loop's run cannot see."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError as error:
        raise ConfigurationError(
            f"optimizer: {type(optimizer).__name__} has no hooks, by which a run sees its steps; call "
            "super().__init__(parameters, defaults) in its constructor"
        ) from error


def optimizer_from_args(modules: Iterable[nn.Module], args: TrainingArguments) -> Optimizer:
    """``args.optim`` on all trained parameters of ``modules``, with weight decay on matrices, not on vectors (norms,
    biases).
    """
    modules = list(modules)
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    settings: dict[str, Any] = {"lr": args.learning_rate, **(adam if takes_adam_settings(args) else {})}
    settings |= {"fused": True} if args.optim == "adamw_fused" else {}
    settings |= args.optim_args or {}
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        state = "are frozen; set requires_grad_(True) on those to train" if parameters else "are missing"
        raise ConfigurationError(f"optim={args.optim!r} has nothing to train: all parameters of the model {state}")
    groups: Groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    if args.optim == "muon":
        matrices = _hidden_matrices(modules, settings.pop("matrices", None))
        groups = [
            {**group, "params": [each for each in group["params"] if (id(each) in matrices) is muon], "use_muon": muon}
            for group in groups
            for muon in (True, False)
        ]
    build = find_named(OPTIMIZERS.get(args.optim, args.optim), "optimizer", "torch.optim:RMSprop")
    try:
        optimizer = build([group for group in groups if group["params"]], **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"optim={args.optim!r} with {settings}: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"optim={args.optim!r} builds a {type(optimizer).__name__}, not an optimizer of torch")
    return optimizer


def _hidden_matrices(modules: Sequence[nn.Module], patterns: Sequence[str] | None) -> dict[int, str]:
    """``id`` and name of the matrices that Muon updates: those in the model's blocks, without embeddings and output
    layers, as Jordan et al. advise; or those whose names match ``patterns``.

    A block without submodules, such as a layer of an output head ``nn.Sequential(nn.Linear(…), nn.ReLU(), …)``, does
    not count as one.
    """
    named = [each for module in modules for each in named_parameters(module)]
    matrices = {id(each): name for name, each in named if each.ndim == 2 and each.requires_grad}
    if patterns is None:
        chosen = _in_blocks(modules)
        problem = "there is no matrix in a block of the model (an element of a ModuleList or Sequential)"
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in matrices.values())]
        matched = {key for key, name in matrices.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
        chosen = set() if idle else matched
        problem = f"{', '.join(map(repr, idle)) or 'an empty list'} in optim_args['matrices'] matches no matrix"
    found = {key: name for key, name in matrices.items() if key in chosen}
    if not found:
        raise ConfigurationError(
            f"optim='muon': {problem}; name the matrices that Muon updates: optim_args={{'matrices': ['layers.*']}}. "
            f"The model's matrices are {_listed(matrices.values())}"
        )
    if collectives.rank() == 0:
        rest = _listed(name for key, name in matrices.items() if key not in found)
        logger.info("optim='muon': Muon updates %d matrices, AdamW all vectors and %s", len(found), rest)
    return found


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return f"{', '.join(names[:5]) or 'no matrix'}{', …' if len(names) > 5 else ''}"


def _in_blocks(modules: Sequence[nn.Module]) -> set[int]:
    """``id`` of each parameter in a block with submodules, without embeddings, and without the output layer where the
    model names it, as Hugging Face's do."""
    found = set[int]()
    for module in modules:
        blocks = [block for block in outermost_blocks(module) if any(True for _ in block.children())]
        found |= {id(parameter) for block in blocks for parameter in block.parameters()}
    for module in modules:
        find = getattr(module, "get_output_embeddings", None)
        layers: list[nn.Module] = [
            each for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)
        ]
        layers += [output] if callable(find) and isinstance(output := find(), nn.Module) else []
        found -= {id(parameter) for layer in layers for parameter in layer.parameters()}
    return found
