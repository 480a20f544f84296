"""Callbacks' base class, events, contexts, and the dispatcher that calls handlers."""

from . import contexts as contexts
from .callback import Binder as Binder
from .callback import Callback as Callback
from .callback import FlaglessCallback as FlaglessCallback
from .table import Event as Event
