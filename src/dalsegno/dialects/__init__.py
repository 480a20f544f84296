"""The dialects: one module or package each, with a class ``DIALECT``. See :mod:`dalsegno.foreign`, which finds them.

Each is a leaf: nothing imports it, and it can be deleted without a trace.
"""
