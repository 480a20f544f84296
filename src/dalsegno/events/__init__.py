"""Events: their table, their contexts, the callbacks that handle them, and the dispatcher that calls the handlers."""
