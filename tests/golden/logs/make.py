"""Makes the logs that lie here: ``python tests/golden/logs/make.py``. Real runs, killed with a real signal.

- ``killed``: killed twice, gone on with, and at last gone back to an older checkpoint.
- ``diverged``: its learning rate is far too high; the detector stops it.
- ``pair-a``, ``pair-b``: the same run with two learning rates.

They are kept as they are: times and machine in them are those of the day on which they were made. What the commands
print of them lies in ``printed/``, and is written by ``python tests/golden/logs/printed.py``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

import dalsegno as ds
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger, ParameterNormLogger
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, TinyRegression, start_ranks, tiny_regression_data

HERE = Path(__file__).parent


def trainer(folder: Path, rate: float, momentum: float = 0.0) -> ds.Trainer:
    """Forty steps, five an epoch; a record every two, an evaluation every ten, a checkpoint every eight."""
    torch.manual_seed(0)
    model = TinyRegression()
    args = ds.TrainingArguments(
        folder,
        max_steps=40,
        per_device_train_batch_size=4,
        logging_steps=2,
        eval_steps=10,
        save_steps=8,
        use_cpu=True,
        disable_tqdm=True,
        max_grad_norm=1000.0,
    )
    return ds.Trainer(
        model,
        args,
        train_dataset=tiny_regression_data(20),
        eval_dataset=tiny_regression_data(8, seed=1),
        optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum),
        callbacks=[
            JsonLogger(run=folder.name, rate=rate),
            GradNormLogger(),
            ParameterNormLogger(),
            DivergenceDetector(threshold=1.0, patience=2, warmup=3, action="abort"),
        ],
    )


def train(folder: Path, rate: float, plan: FaultPlan | None = None, checkpoint: str | None = None) -> None:
    """One leg."""
    if plan is not None:
        plan.arm()
    trainer(folder, rate).train(folder / checkpoint if checkpoint else True)


def leg(folder: Path, rate: float, plan: FaultPlan | None = None, checkpoint: str | None = None) -> None:
    (outcome,) = start_ranks(train, 1, folder, rate, plan, checkpoint).wait()
    assert outcome.error is None, outcome.error
    assert outcome.was_killed == (plan is not None)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary)
        leg(runs / "killed", 0.05, FaultPlan(event=Event.STEP_DONE, count=23))
        leg(runs / "killed", 0.05, FaultPlan(event=Event.STEP_DONE, count=19))
        leg(runs / "killed", 0.05)
        leg(runs / "killed", 0.05, checkpoint="checkpoints/step-00000016")
        leg(runs / "diverged", 1.2)
        leg(runs / "pair-a", 0.05)
        leg(runs / "pair-b", 0.02)
        for run in sorted(runs.iterdir()):
            shutil.rmtree(HERE / run.name, ignore_errors=True)
            shutil.copytree(run, HERE / run.name, ignore=shutil.ignore_patterns("checkpoints", ".l*", "timeline.*"))


if __name__ == "__main__":
    main()
