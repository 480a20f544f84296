"""Test tools: show that a killed run resumes exactly. Used by dalsegno's own tests, and for those of its users.

Start with ``assert_resume_equivalent(factory, kill_at=[...])``.
"""

from .compare import Row as Row
from .compare import RunComparison as RunComparison
from .compare import compare_runs as compare_runs
from .equivalence import assert_resume_equivalent as assert_resume_equivalent
from .equivalence import check_resume as check_resume
from .faults import FaultPlan as FaultPlan
from .processes import Outcome as Outcome
from .processes import Ranks as Ranks
from .processes import run_ranks as run_ranks
from .processes import start_ranks as start_ranks
from .thorough_check import BRIEF as BRIEF
from .thorough_check import THOROUGH as THOROUGH
from .thorough_check import Break as Break
from .thorough_check import Pattern as Pattern
from .thorough_check import Trial as Trial
from .thorough_check import Verdict as Verdict
from .thorough_check import check_resume_thoroughly as check_resume_thoroughly
from .tiny import DataOrder as DataOrder
from .tiny import TinyLanguageModel as TinyLanguageModel
from .tiny import TinyRegression as TinyRegression
from .tiny import tiny_regression_data as tiny_regression_data
