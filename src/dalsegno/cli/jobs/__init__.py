"""List running jobs, ask them for their status, and send them commands.

JOB is a job's id as 'dalsegno jobs list' shows it, the beginning of one, or the job's output_dir. Commands reach a job
over HTTP if it has TrainerControlCallback, otherwise as files in its output_dir. docs/jobs.md describes them.
"""

from __future__ import annotations

COMMANDS = (
    "list",
    "status",
    "watch",
    "open",
    "save",
    "stop",
    "save-stop",
    "abort",
    "evaluate",
    "log",
    "set",
    "callbacks",
    "switch",
    "cleanup",
)
"""In the order of the help."""
