"""Test tools: show that a killed run resumes exactly. Used by dalsegno's own tests, and for those of its users.

Start with ``assert_resume_equivalent(factory, kill_at=[...])``.
"""

from .compare import Row, RunComparison, compare_runs
from .equivalence import assert_resume_equivalent, check_resume
from .faults import FaultPlan
from .processes import Outcome, Ranks, run_ranks, start_ranks
from .thorough_check import BRIEF, THOROUGH, Break, Pattern, Trial, Verdict, check_resume_thoroughly
from .tiny import DataOrder, TinyLanguageModel, TinyRegression, tiny_regression_data

__all__ = [
    "BRIEF",
    "THOROUGH",
    "Break",
    "DataOrder",
    "FaultPlan",
    "Outcome",
    "Pattern",
    "Ranks",
    "Row",
    "RunComparison",
    "TinyLanguageModel",
    "TinyRegression",
    "Trial",
    "Verdict",
    "assert_resume_equivalent",
    "check_resume",
    "check_resume_thoroughly",
    "compare_runs",
    "run_ranks",
    "start_ranks",
    "tiny_regression_data",
]
