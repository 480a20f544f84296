"""Other libraries: one package each, with a class ``DIALECT`` that :mod:`dalsegno.events.adapters` finds.

No other package imports one of these; any can be deleted, together with its folder in ``tests/interop``.
"""
