"""The other libraries: one package each, with a class ``DIALECT``. :mod:`dalsegno.events.adapters` finds them.

Each is a leaf: nothing imports it, and it can be deleted without a trace.
"""
