"""Pipelines: a model cut into stages, each on other ranks, with torch's schedules (``torch.distributed.pipelining``).

::

    cut.py        which module belongs to which stage
    stage.py      runs one stage: the user's own forward, between two activations
    schedules.py  torch's schedules by name, and what each needs
    runner.py     runs the micro-batches of a step, or an evaluation batch, through all stages
"""
