"""What communication costs: bytes that a rank sends, and seconds by latency and bandwidth.

The model is alpha-beta: a collective over k ranks costs its number of rounds times the latency, plus the bytes that
each rank sends over the link's bandwidth. Bytes are those of the bandwidth-optimal (ring) algorithms.

Reference: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

import math
from dataclasses import dataclass

#: The collectives of boxing, by the names of XLA's operations.
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")


@dataclass(frozen=True, slots=True)
class Link:
    """How fast the ranks along one placement axis talk: seconds a message, bytes a second for each rank."""

    latency_s: float = 10e-6
    bytes_per_s: float = 25e9


#: Used where nothing is known. Only the ratio of latency to bandwidth decides between routes.
DEFAULT_LINK = Link()


def sent_bytes(collective: str, local_bytes: float, ranks: int) -> float:
    """Bytes that one rank sends.

    Args:
        collective: One of :data:`COLLECTIVES`.
        local_bytes: What a rank holds before it. For an all-gather that is its own part.
        ranks: How many ranks take part.
    """
    share = (ranks - 1) / ranks
    match collective:
        case "all-reduce":
            return 2 * share * local_bytes
        case "reduce-scatter" | "all-to-all":
            return share * local_bytes
        case "all-gather":
            return (ranks - 1) * local_bytes
    raise ValueError(f"{collective!r} is none of {COLLECTIVES}")


def seconds(collective: str, local_bytes: float, ranks: int, link: Link = DEFAULT_LINK) -> float:
    """Modelled seconds of a collective; arguments as in :func:`sent_bytes`."""
    if ranks == 1:
        return 0.0
    rounds = 2 * math.ceil(math.log2(ranks)) if collective == "all-reduce" else math.ceil(math.log2(ranks))
    return rounds * link.latency_s + sent_bytes(collective, local_bytes, ranks) / link.bytes_per_s


def memory_seconds(local_bytes: float) -> float:
    """A cost for touching memory, so that of two routes without communication the one that copies less wins."""
    return local_bytes * 1e-12
