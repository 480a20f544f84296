"""Benchmarks: each prints what dalsegno takes, what a peer takes in the same run, and what we want to reach.

``python -m benchmarks`` runs all of them, ``python -m benchmarks NAME…`` some. Peers that have dependencies of
their own live in ``.venv-peers`` (``make peers``) and are run there as scripts: see :mod:`benchmarks.peers`.
"""
