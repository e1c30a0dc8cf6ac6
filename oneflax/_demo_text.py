"""The demo's text: the source of Python's own standard library, as tokens of a byte-pair code trained on the spot.

The text is on every machine that runs Python, so the demo downloads nothing. The code starts from the 256 bytes and
joins, again and again, the pair of tokens that stands side by side most often (Gage 1994; Sennrich et al. 2016).
Merges may cross spaces and lines: a colon, a line end and an indentation become one token, which suits source text.
Arrays of tokens go through numpy whole, so training and encoding take a second or two.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""Token numbers, ``(tokens,)``."""

BYTES = 256
"""The tokens that every code starts from: one for each byte."""


def stdlib_files() -> Iterator[Path]:
    """The top-level public modules of Python's standard library, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return (path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_"))


def stdlib_text(size_bytes: int) -> bytes:
    """Joins the standard library's modules in the order of their names, and keeps the first ``size_bytes``.

    Raises:
        FileNotFoundError: This Python carries no source files (a frozen or zipped one).
    """
    parts: list[bytes] = []
    length_bytes = 0
    for path in stdlib_files():
        parts.append(path.read_bytes())
        length_bytes += len(parts[-1])
        if length_bytes >= size_bytes:
            break
    if not parts:
        raise FileNotFoundError(f"no .py files of the standard library in {sysconfig.get_paths()['stdlib']}")
    return b"".join(parts)[:size_bytes]


@dataclass(frozen=True, slots=True)
class BytePairs:
    """A byte-pair code.

    Args:
        merges: ``merges[i]`` is the pair of tokens that token ``256 + i`` stands for.

    Example:
        >>> code = BytePairs.train(b"ababab", vocab=258)
        >>> code.merges
        ((97, 98), (256, 256))
        >>> code.encode(b"abab!").tolist()
        [257, 33]
        >>> code.decode([257, 33])
        'abab!'
    """

    merges: tuple[tuple[int, int], ...]

    @property
    def vocab(self) -> int:
        """The number of tokens."""
        return BYTES + len(self.merges)

    @classmethod
    def train(cls, text: bytes, vocab: int) -> "BytePairs":
        """Learns a code of at most ``vocab`` tokens; fewer when no pair is left that stands twice.

        Equal counts are settled by the smaller token numbers, so equal text gives equal codes.
        """
        tokens, merges = _from_bytes(text), []
        for token in range(BYTES, vocab):
            counts = np.bincount(tokens[:-1] * vocab + tokens[1:], minlength=1)
            best = int(counts.argmax())
            if counts[best] < 2:
                break
            merges.append(divmod(best, vocab))
            tokens = _merge(tokens, merges[-1], token)
        return cls(tuple(merges))

    def encode(self, text: bytes) -> Tokens:
        """The tokens of ``text``: the merges in the order in which they were learnt."""
        tokens = _from_bytes(text)
        for token, pair in enumerate(self.merges, BYTES):
            tokens = _merge(tokens, pair, token)
        return tokens

    def decode(self, tokens: NDArray[np.integer] | list[int]) -> str:
        """The text of ``tokens``; bytes that are no UTF-8 show as the replacement sign."""
        spelled = [bytes([byte]) for byte in range(BYTES)]
        for left, right in self.merges:
            spelled.append(spelled[left] + spelled[right])
        return b"".join(spelled[int(token)] for token in tokens).decode(errors="replace")


def unigram_entropy(tokens: Tokens) -> float:
    """Nats per token of a model that knows how frequent each token is and nothing else.

    It is ``-sum(p log p)`` over the tokens' frequencies ``p``; a model whose loss is below it has learnt from context.

    Example:
        >>> round(unigram_entropy(np.array([0, 1, 0, 1], np.int32)), 4)
        0.6931
    """
    counts = np.bincount(tokens)
    share = counts[counts > 0] / len(tokens)
    return float(-(share * np.log(share)).sum())


def batch_of(tokens: Tokens, step: int, *, rows: int, length: int, seed: int) -> NDArray[np.int32]:
    """Random pieces of the text, ``(rows, length)``: the same for every run with this seed and step."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - length + 1, rows)
    return tokens[starts[:, None] + np.arange(length)]


def _from_bytes(text: bytes) -> Tokens:
    return np.frombuffer(text, np.uint8).astype(np.int32)


def _merge(tokens: Tokens, pair: tuple[int, int], token: int) -> Tokens:
    """Replaces every ``pair`` from left to right by ``token``."""
    left, right = pair
    at = np.flatnonzero((tokens[:-1] == left) & (tokens[1:] == right))
    if left == right:
        # A run of equal tokens matches at every place; only every second match is free of the one before it.
        run_start = np.r_[True, np.diff(at) != 1][: len(at)]
        place_in_run = np.arange(len(at)) - np.flatnonzero(run_start)[np.cumsum(run_start) - 1]
        at = at[place_in_run % 2 == 0]
    merged = tokens.copy()
    merged[at] = token
    return np.delete(merged, at + 1)
