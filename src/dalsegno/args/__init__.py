"""The settings of a run, and an answer for each setting of other trainers."""

from .other_names import answers as answers
from .training_arguments import Strategy as Strategy
from .training_arguments import TrainingArguments as TrainingArguments
