"""Which device a rank trains on, and that an accelerator is not left idle without a word."""

from __future__ import annotations

import pytest
import torch

from dalsegno.distributed.parallel.torchrun import init_distributed


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU would be used")
@pytest.mark.parametrize(
    ("kind", "use_cpu", "warns"), [("mps", False, True), ("mps", True, False), (None, False, False)]
)
def test_an_accelerator_that_is_not_used_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str | None, use_cpu: bool, warns: bool
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(str(kind)))
    assert init_distributed(use_cpu) == torch.device("cpu")
    assert ("has an accelerator of type 'mps', but training runs on the CPU" in caplog.text) == warns
