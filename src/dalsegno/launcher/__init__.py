"""Launcher: start the ranks of a run on this host, restart them after a failure, and report how the run ended.

The agent is torchrun's: rendezvous, ranks and restarts are those of ``torch.distributed.elastic``. Beyond torchrun:
ranks are forked from a process that has torch loaded, callbacks travel with their state, a hang counts as a failure,
and each leg of ``run.json`` names what ended the one before.
"""
