"""Makes the pictures of docs/guides/logs.md: ``python docs/images/plots.py [FOLDER]``, with the runs in FOLDER.

Three small transformers learn the source of Python's standard library: one is killed and resumes, one has twice the
learning rate, and one far too high a one. The picture of the report needs Chromium (environment variable CHROMIUM).
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

import dalsegno as ds
from dalsegno.callbacks import GradNormLogger, JsonLogger
from dalsegno.cli.demo.training import BATCH, CONTEXT, Text, source_files
from dalsegno.testing import FaultPlan, TinyLanguageModel, start_ranks

HERE = Path(__file__).parent
STEPS = 1000
RATES = {"baseline": 3e-3, "twice the rate": 6e-3, "ten times the rate": 3e-2}
KILLED = "baseline"
CHROMIUM = HERE.parents[1] / "tests"
"""Where the browser's driver lies."""


def train(
    folder: Path,
    rate: float,
    plan: FaultPlan | None = None,
    *,
    steps: int = STEPS,
    callbacks: Sequence[ds.Callback] = (),
) -> None:
    """One leg."""
    if plan is not None:
        plan.arm()
    torch.manual_seed(0)
    model = TinyLanguageModel(width=64, depth=2, heads=2, context=CONTEXT)
    paths = source_files()
    args = ds.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=4 * BATCH,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        logging_steps=2,
        eval_steps=50,
        save_steps=250,
        use_cpu=True,
        disable_tqdm=True,
    )
    ds.Trainer(
        model,
        args,
        train_dataset=Text(paths[:400]),
        eval_dataset=Text(paths[400:440], 128),
        callbacks=[JsonLogger(run=folder.name, learning_rate=rate), GradNormLogger(), *callbacks],
    ).train()


def runs(folder: Path) -> list[ds.TrainingLog]:
    for name, rate in RATES.items():
        if (folder / name / "run.json").exists():
            continue
        if name == KILLED:
            start_ranks(train, 1, folder / name, rate, FaultPlan(event=ds.Event.STEP_END, count=640)).wait(600)
        start_ranks(train, 1, folder / name, rate).wait(600)
    return [next(iter(ds.open_log(folder / name))) for name in RATES]


def keep(png: bytes, name: str, width: int = 1100) -> None:
    """Small: these pictures have few colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    if picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    picture.quantize(256, dither=Image.Dither.NONE).save(HERE / f"{name}.png", optimize=True)
    print(f"{name}.png: {(HERE / f'{name}.png').stat().st_size / 1000:.0f} kB")


def picture_of(report: Path) -> bytes:
    """Its upper part, with the pointer over a curve."""
    sys.path.insert(0, str(CHROMIUM))
    from support.chromium import Chromium

    with tempfile.TemporaryDirectory() as profile, Chromium(Path(profile)) as browser:
        browser.open(report)
        browser.look(1100, 1060)
        box = "document.querySelector('figure svg').getBoundingClientRect()"
        x, y = (
            browser.run(f"{box}.{side} + {box}.{size} * 0.3") for side, size in (("left", "width"), ("top", "height"))
        )
        browser.mouse("mouseMoved", x, y)
        return browser.picture(whole=False)


def main(folder: Path) -> None:
    logs = runs(folder)
    killed = logs[0]
    keep(killed.plot()._repr_png_(), "plot")
    keep(ds.plot_logs(logs, compare=True, view=ds.View(x="tokens", ylim=(1.5, 4.5)))._repr_png_(), "plot-compare")
    keep(ds.plot_heatmap(killed.parameters("grad_norm"))._repr_png_(), "heatmap")
    keep(picture_of(ds.write_report(logs, folder / "report.html")), "report")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
