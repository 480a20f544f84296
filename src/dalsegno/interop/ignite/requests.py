"""Requests of callbacks, as an Ignite trainer does them: by events with the user's handlers, and by terminating."""

from __future__ import annotations

from ignite.engine import Engine
from ignite.engine.events import EventEnum

from dalsegno.errors import ConfigurationError
from dalsegno.interop.leg import Leg


class Request(EventEnum):
    """Events of the trainer that the Bridge fires when a callback on any rank makes such a request."""

    SAVE = "dalsegno_request_save"
    """Also fires before a stop."""
    EVALUATE = "dalsegno_request_evaluate"


class Requests:
    """Does what callbacks request of one trainer."""

    def __init__(self, trainer: Engine) -> None:
        trainer.register_events(*Request, event_to_attr=dict.fromkeys(Request, "iteration"))
        self._trainer = trainer
        self.begin()

    def begin(self) -> None:
        """Forget the requests of an earlier run."""
        self.is_stopping = False
        self._owes_evaluation = False  # requested during another one

    def follow(self, leg: Leg, *, evaluates: bool = True) -> bool:
        """Do what callbacks on any rank request, on all ranks. Returns whether a record is wanted. Collective.

        Args:
            evaluates: False: an evaluation that is requested waits for the next call.

        Raises:
            ConfigurationError: if no handler is added for the request.
        """
        requests = leg.requests()
        self._owes_evaluation |= requests.evaluate
        if self._owes_evaluation and evaluates:
            self._owes_evaluation = False
            self._fire(Request.EVALUATE)
        stops = (requests.stop or requests.abort) and not self.is_stopping
        if requests.save or (stops and not requests.abort and self._is_handled(Request.SAVE)):
            self._fire(Request.SAVE)
        if requests.end_epoch:
            self._trainer.terminate_epoch()
        if stops:
            self.is_stopping = True
            self._trainer.terminate()
            leg.warn_stops()
        return requests.log

    def _fire(self, request: Request) -> None:
        if not self._is_handled(request):
            raise ConfigurationError(
                f"Bridge: a callback requests what Ignite leaves to handlers, and there is none for {request}; add "
                f"one: trainer.add_event_handler({request}, …)"
            )
        self._trainer.fire_event(request)

    def _is_handled(self, request: Request) -> bool:
        return bool(self._trainer._event_handlers.get(request))
