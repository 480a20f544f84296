"""Events: the event table, contexts, callbacks, and the dispatcher that calls their handlers."""
