"""Other libraries, one module or package each. Any can be deleted, together with its tests in ``tests/interop``.

It has a class ``DIALECT`` (their callbacks here), a class ``Bridge`` (dalsegno's there), or functions ``take_apart``
and ``hidden_tensors`` (their tensors in checkpoints). :mod:`dalsegno.events.adapters` finds the dialects and
:mod:`dalsegno.checkpoint.wrapped` the tensors. Nothing else imports a library's module.

Dialects are built on :mod:`.observers` and :mod:`.stand_in`, bridges on :mod:`.leg` and
:mod:`.states`.
"""
