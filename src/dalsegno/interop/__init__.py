"""Other libraries, one package each. Any can be deleted, together with its folder in ``tests/interop``.

A package has a class ``DIALECT`` (their callbacks here), a class ``Bridge`` (dalsegno's there), or a module ``tensors``
(their tensors in checkpoints). :mod:`dalsegno.events.adapters` finds the dialects and
:mod:`dalsegno.checkpoint.state.wrapped` the tensors; what all bridges share is in :mod:`dalsegno.interop.leg`. Nothing
else imports one of these packages.
"""
