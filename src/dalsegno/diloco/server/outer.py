"""GlobalModel and its outer optimizer: how pseudo-gradients change the global parameters.

A pseudo-gradient is the difference of the global parameters that a worker began with and the parameters that it has
after its local steps (DiLoCo, Douillard et al. 2023, arXiv:2311.08105). The outer optimizer takes it as a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dalsegno.diloco.wire.signature import Specs, TensorSpec, master_dtype
from dalsegno.errors import ConfigurationError
from dalsegno.system.machine import thread_count

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

BLOCK = 1 << 18
"""Elements of a tensor that are worked on at a time: few enough for the processor's cache."""

ALONE = 1 << 15
"""Elements up to which torch computes on one thread. Its threads wait for each other after each operation: on blocks
and beside other work, that takes ten times as long as the work itself."""

_LINE = 64  # bytes to which gradients are aligned


class GlobalModel(nn.Module):
    """The global parameters, under the names that they have in the workers' models; at least float32, on the CPU.
    Raises ConfigurationError for a name that no parameter of a module can have."""

    def __init__(self, specs: Specs) -> None:
        super().__init__()
        self.specs = specs
        self.by_name: dict[str, nn.Parameter] = {}
        for spec in specs:
            *path, last = spec.name.split(".")
            module: nn.Module = self
            try:
                for part in path:
                    if part not in module._modules:
                        module.add_module(part, nn.Module())
                    module = module.get_submodule(part)
                parameter = nn.Parameter(torch.zeros(spec.shape, dtype=master_dtype(spec.dtype)))
                module.register_parameter(last, parameter)
            except (KeyError, TypeError, AttributeError) as error:
                raise ConfigurationError(f"{spec.name!r}: no module has a parameter of this name ({error})") from error
            self.by_name[spec.name] = parameter
        self._gradients = torch.empty(0, dtype=torch.uint8)

    def bytes_as_trained(self, specs: Specs) -> Iterator[memoryview]:
        """Parameters in the dtypes that the workers train, one after the other, in pieces; the next piece overwrites
        one."""
        for spec in specs:
            flat = self.by_name[spec.name].detach().view(-1)
            scratch = torch.empty(min(BLOCK, len(flat)), dtype=spec.dtype)
            for begin in range(0, len(flat), BLOCK):
                part = flat[begin : begin + BLOCK]
                piece = scratch[: len(part)]
                torch._foreach_copy_(_parts(piece), _parts(part))
                yield piece.view(torch.uint8).numpy().data

    def allot_gradients(self, specs: Specs) -> None:
        """Give parameters gradients without values. All outer steps use the same memory: new memory costs more than the
        step itself."""
        parameters = [self.by_name[spec.name] for spec in specs]
        sizes = [-(-each.nbytes // _LINE) * _LINE for each in parameters]
        if sum(sizes) > len(self._gradients):
            self._gradients = torch.empty(sum(sizes), dtype=torch.uint8)
        begin = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            memory = self._gradients[begin : begin + parameter.nbytes]
            parameter.grad = memory.view(parameter.dtype).view(parameter.shape)
            begin += size


class DelayedNesterov(Optimizer):
    """SGD whose Nesterov momentum changes only at every n-th pseudo-gradient.

    Between these, a pseudo-gradient moves the parameters without momentum. For asynchronous training, where momentum
    would follow single stale workers: algorithm 3 with c = 0 of Liu et al. 2024, "Asynchronous Local-SGD Training for
    Language Modeling" (arXiv:2401.09135). With ``buffer_size=1`` it is ``torch.optim.SGD(nesterov=True)``.

    Args:
        params: as for every optimizer.
        lr: learning rate.
        momentum: decay of the momentum, from 0 to below 1.
        buffer_size: pseudo-gradients between two changes of the momentum, N in the paper; each is divided by it.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, buffer_size: int = 1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "buffer_size": buffer_size})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            size = group["buffer_size"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["momentum_buffer"], state["gradient_sum"] = (torch.zeros_like(parameter) for _ in range(2))
                state["step"] += 1
                state["gradient_sum"].add_(parameter.grad)
                direction = parameter.grad.div(size)
                if state["step"] % size == 0:
                    momentum = state["momentum_buffer"].mul_(group["momentum"])
                    momentum.add_(state["gradient_sum"], alpha=1 / size)
                    direction.add_(momentum, alpha=group["momentum"])
                    state["gradient_sum"].zero_()
                parameter.add_(direction, alpha=-group["lr"])


def nesterov(lr: float = 0.7, momentum: float = 0.9, *, is_nesterov: bool = True) -> MakeOptimizer:
    """The outer optimizer of the DiLoCo paper, with its hyperparameters."""
    return lambda parameters: torch.optim.SGD(
        parameters, lr=lr, momentum=momentum, nesterov=is_nesterov and momentum > 0, fused=True
    )


def delayed_nesterov(lr: float = 0.7, momentum: float = 0.9, *, buffer_size: int) -> MakeOptimizer:
    """:class:`DelayedNesterov` with these hyperparameters."""
    return lambda parameters: DelayedNesterov(parameters, lr, momentum, buffer_size)


def describe(optimizer: Optimizer) -> str:
    """The optimizer's class and hyperparameters, without the choice of kernels, which only changes the rounding."""
    group = optimizer.param_groups[0].items()
    values = ", ".join(f"{name}={value!r}" for name, value in group if name not in ("params", "foreach", "fused"))
    return f"{type(optimizer).__name__}({values})"


ReadBlock = Callable[[int, TensorSpec, int, int], Tensor]
"""Returns a worker's pseudo-gradient, flat: of the worker at this place, of a parameter, from this element on, so many
elements. Its memory may be overwritten by the next call. Used on one thread."""


def outer_step(
    model: GlobalModel,
    optimizer: Optimizer,
    specs: Specs,
    weights: Sequence[float],
    open_reader: Callable[[], ReadBlock],
) -> None:
    """Update the parameters ``specs`` by the weighted mean of the workers' pseudo-gradients, which ``open_reader``,
    called on each thread, returns a reader of; the others stay. ``weights``: not all 0."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    model.allot_gradients(specs)
    blocks = [(spec, begin) for spec in specs for begin in range(0, spec.count, BLOCK)]
    threads = max(1, min(thread_count(), len(blocks)))
    left = iter(blocks)
    with ThreadPoolExecutor(threads, thread_name_prefix="dalsegno-diloco-mean") as pool:
        for each in [pool.submit(_average, model, left, shares, open_reader) for _ in range(threads)]:
            each.result()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def _average(
    model: GlobalModel,
    left: Iterator[tuple[TensorSpec, int]],
    shares: Sequence[float],
    open_reader: Callable[[], ReadBlock],
) -> None:
    """Compute the gradients of blocks of parameters, on one of several threads: each takes the next block."""
    read = open_reader()
    scratch = {spec.dtype: torch.empty(BLOCK, dtype=master_dtype(spec.dtype)) for spec in model.specs}
    for spec, begin in left:
        gradient = model.by_name[spec.name].grad
        assert gradient is not None, "it was allotted"
        mean = gradient.view(-1)[begin : begin + BLOCK]
        means, parts = _parts(mean), _parts(scratch[spec.dtype][: len(mean)])
        torch._foreach_copy_(means, _parts(read(0, spec, begin, len(mean))))
        torch._foreach_mul_(means, shares[0])
        for number in range(1, len(shares)):
            torch._foreach_copy_(parts, _parts(read(number, spec, begin, len(mean))))
            torch._foreach_mul_(parts, shares[number])
            torch._foreach_add_(means, parts)


def _parts(flat: Tensor) -> list[Tensor]:
    """Views of a flat tensor, of which each is computed on one thread."""
    return list(torch.split(flat, ALONE))
