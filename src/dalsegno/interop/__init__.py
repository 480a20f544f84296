"""Other libraries: one package each, with a class ``DIALECT`` (their callbacks here) or ``Bridge`` (dalsegno's there).

:mod:`dalsegno.events.adapters` finds the dialects; what all bridges share is in :mod:`dalsegno.interop.leg`. Nothing
else imports one of these packages; any can be deleted, together with its folder in ``tests/interop``.
"""
