"""Says why a batch has to run again: something of its step was not known."""

from __future__ import annotations

from enum import Enum


class Rerun(Enum):
    """Why a batch has to run again; of several reasons, the last one in this list counts."""

    DRAWS = "the step draws random numbers outside the layers"
    READS = "the step reads a value that was not sent, or a number for the first time"
    HAS_OTHER_EFFECTS = "the step does more than to return a loss and to log it"
    MIXES = "the code before the layers mixes samples"
    FAILS = "a run on a micro-batch raised an error"
    SAMPLES = "it is not known which rows of a tensor, or which numbers, belong to which sample"


class RunAgain(BaseException):
    """Ends a run whose effects are dropped, as the batch has to run again."""

    def __init__(self, why: Rerun) -> None:
        super().__init__(why.value)
        self.why = why
