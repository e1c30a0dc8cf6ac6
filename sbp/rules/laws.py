"""The algebraic laws that rules rest on, and what a row of the table is."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Law(Enum):
    """Why a row's signatures are right. A P passes only where its law says so."""

    POINTWISE = "acts on each element (or index) alone: any split passes, no P"
    INCREASING = (
        "pointwise, and f(max(a, b)) = max(f(a), f(b)): P(max) and P(min) pass; for P of a sum nothing is known"
    )
    LINEAR = "f(a + b, c + d) = f(a, c) + f(b, d): P passes when all linear inputs are P"
    MULTILINEAR = "f(a + b, c) = f(a, c) + f(b, c), and so for the other input: P passes from one, with the others B"
    SELECTION = "moves, repeats or chooses elements and computes nothing: every kind of P passes"
    LATTICE = "maximum and minimum: associative, and each distributes over the other; NaN absorbs"
    NORMALISING = "needs all of some tensor axes at once: split there, the local op runs collectives"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        law: Why it is right.
        formula: The rule's formula, or a whole rule, in the notation of ``notation.py``; or the function that gives
            it from the shapes of the inputs and the op's parameters.
        partials: Clauses of P that are added to it.
    """

    law: Law
    formula: str | Callable[..., str]
    partials: str = ""
