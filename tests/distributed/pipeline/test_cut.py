"""Where a model cannot be cut into stages, or a loop cannot be run in a layout, the error says what fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import dalsegno as ds
from dalsegno.distributed.layout import layout_of_own_loop
from dalsegno.distributed.pipeline.cut import cut


class Model(nn.Module):
    """An embedding, four layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Linear(2, 2), nn.Identity()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(2, 1)


class WithExtraState(Model):
    def get_extra_state(self) -> dict[str, int]:
        return {}


class WithRouterLogits(Model):
    config = SimpleNamespace(output_router_logits=True)


LISTED = [["embed", "layers.0"], ["layers.1", "layers.2", "layers.3", "head"]]


@pytest.mark.parametrize(
    ("build", "stages", "message"),
    [
        (lambda: nn.Linear(2, 2), 2, "Linear has no ModuleList or Sequential with two blocks; name the modules"),
        (Model, 5, "'layers', has 4 blocks with parameters: from 2 to 4 stages fit"),
        (Model, ["layer.2"], "unknown module in Pipeline(stages=…) 'layer.2'; did you mean 'layers.2'?"),
        (
            Model,
            ["layers.2", "layers.1"],
            "is registered before 'layers.2'; give the split points in",
        ),
        (Model, ["scale"], "no stage can begin at 'scale': it has no parameters"),
        (Model, [*LISTED, ["layers.3"]], "'layers.3' is listed twice; list it once"),
        (Model, [["embed", "layers"], ["layers.3", "head"]], "'layers.3' is listed twice"),
        (
            Model,
            [["embed", "layers"], ["scale", "head"], ["layers.3.1"]],
            "'layers.3.1' is listed twice, by itself and in 'layers.3'",
        ),
        (Model, [["embed", "layers"], ["scale"]], "stage 1 has no parameters (scale); use fewer stages"),
        (Model, [["embed"], ["layers"]], "'head' has parameters and is in no stage; add it to the stage that calls it"),
        (WithExtraState, 2, "the model saves _extra_state, which is not a tensor"),
        (WithRouterLogits, 2, "the model's config has output_router_logits=True"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(build: Callable[[], nn.Module], stages: Any, message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=re.escape(message)):
        cut(build(), stages)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ds.Pipeline(2), "only a Trainer runs a pipeline's forward and backward passes"),
        (ds.TensorParallel(), "spread it, and pass parallel=Parallelized(mesh, data=…)"),
    ],
)
def test_a_loop_of_ones_own_is_told_which_layouts_it_can_have(parallel: Any, message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=re.escape(message)):
        layout_of_own_loop(parallel)


def test_data_ranks_are_asked_for_once_the_ranks_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ds.ConfigurationError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        ds.Layout.of("fsdp")
