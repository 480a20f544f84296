"""A stage for one callback: it is bound by the real dispatcher, and a test fires the events."""

from pathlib import Path
from types import SimpleNamespace

from torch import nn
from torch.optim import SGD

from dalsegno.args import TrainingArguments
from dalsegno.distributed.layout import Layout
from dalsegno.events.callback import Callback
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.state import TrainerControl, TrainerState


class Stage:
    """What a callback sees of a run in ``output_dir``."""

    def __init__(self, output_dir: Path, *callbacks: Callback, model: nn.Module | None = None, rank: int = 0) -> None:
        self.args = TrainingArguments(output_dir)
        self.state = TrainerState(is_world_process_zero=rank == 0)
        self.control = TrainerControl()
        self._model = model or nn.Linear(1, 1)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = SGD(trained, lr=0.0)
        nothing = SimpleNamespace()
        common = {
            "args": self.args,
            "state": self.state,
            "control": self.control,
            "model": self._model,
            "optimizer": self._optimizer,
            "lr_scheduler": nothing,
            "processing_class": None,
            "train_dataloader": None,
            "eval_dataloader": None,
            "trainer": nothing,
            "layout": Layout.flat(),
        }
        self.on = Dispatcher(common, is_rank_zero=rank == 0)
        self.on.bind(callbacks)

    def begin(self) -> None:
        self.state.clock.start()
        self.on.train_begin.fill(None, None)
        self.on.train_begin.fire()

    def log(self, step: int, kind: str = "train", **logs: object) -> None:
        self.state.global_step = step
        self.on.log.fill(logs, kind)
        self.on.log.fire()

    def update(self, step: int, *, evaluates: bool) -> None:
        """The update that makes the count of steps ``step``, and the count."""
        self.state.global_step, self.state.will_evaluate = step - 1, evaluates
        self._optimizer.step()
        self.state.global_step = step
        self.on.step_end.fill(0.0, None, None)
        self.on.step_end.fire()

    def evaluate(self, name: str = "eval") -> None:
        self.on.evaluate.fill({}, name, None, {}, True)
        self.on.evaluate.fire()

    def end(self) -> None:
        self.on.train_end.fill("finished", {})
        self.on.train_end.fire()
