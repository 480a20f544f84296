"""Whether a model's weights are finite: read once, and only where they hold numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dalsegno.distributed.sharded_tensors import are_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_element_is_enough(value: float, dtype: torch.dtype) -> None:
    whole, scalar = torch.full((5, 67), 3e38, dtype=torch.float32), torch.ones((), dtype=torch.float32)
    parameters = [nn.Parameter(whole.to(dtype)), nn.Parameter(scalar), nn.Parameter(torch.empty(0, 3))]
    numbers = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    model = nn.ParameterList([*parameters, numbers])
    assert are_finite(model)
    with torch.no_grad():
        model[0][3, 41] = value
    assert not are_finite(model)
