"""Finds every parameter that the optimizer trains in what a checkpoint contains: else a resumed run would differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from dalsegno.checkpoint import ModelState
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Stateful


def names_of_others(
    optimizer: Optimizer, model: ModelState, loss_fn: Sequence[ModelState], others: Mapping[str, Stateful]
) -> dict[int, str]:
    """Names of the parameters that are neither the model's nor the loss function's, by ``id``: ``head/layer.weight``.

    Args:
        loss_fn: the loss function's state, if it has tensors of its own.
        others: further objects that are saved, by key.

    Raises:
        ConfigurationError: if the optimizer trains a parameter that none of these contains, or none of the model's.
    """
    of_model, of_loss = model.held(), {each for state in loss_fn for each in state.held()}
    foreign = {
        f"group {number}, parameter {position}, of shape {list(parameter.shape)}": parameter
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) not in of_model | of_loss
    }
    names = {
        id(parameter): f"{key}/{name}"
        for key, each in others.items()
        for name, parameter in parameters_of(each, [*foreign.values()])
    }
    unsaved = [place for place, parameter in foreign.items() if id(parameter) not in names]
    is_built_on_model = any(id(each) in of_model for group in optimizer.param_groups for each in group["params"])
    if model.is_trained() and not is_built_on_model and len(unsaved) == len(foreign):
        raise ConfigurationError(
            f"optimizer: none of the parameters of this {type(optimizer).__name__} is the model's, so the model would "
            "not be trained; build it on model.parameters(), after whatever replaces them (fully_shard, a new head)"
        )
    if unsaved:
        more = f", and {len(unsaved) - 1} more" if unsaved[1:] else ""
        raise ConfigurationError(
            f"optimizer: it trains what no checkpoint of this run would contain ({unsaved[0]}{more}). If the model has "
            "replaced that parameter, build the optimizer afterwards. Else a Trainer saves the model and, if it is a "
            'module, loss_fn=: put the parameter into one of them; dalsegno.Run also saves state={"name": module}'
        )
    return names


def parameters_of(thing: Stateful, foreign: Sequence[Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Name and parameter of a module; of anything else, those of ``foreign`` in the memory of its state dict."""
    if isinstance(thing, nn.Module):
        return thing.named_parameters()
    leaves, _ = tree_flatten_with_path(thing.state_dict() if foreign else None)
    return [
        (keystr(path).strip("."), parameter)
        for path, leaf in leaves
        for parameter in foreign
        if _is_same_memory(parameter, leaf)
    ]


def _is_same_memory(one: Tensor, other: object) -> bool:
    if not isinstance(other, Tensor) or isinstance(one, DTensor) or isinstance(other, DTensor):
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
