"""The language of paths: globs against a matcher that walks segments, regular expressions against ``re``."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneflax import PlanError
from oneflax._paths import leaf_paths
from oneflax._patterns import Pattern, nearest

GLOBS = [
    ("model/layers/*", "model/layers/3", "model/layers/3"),
    ("model/layers/*", "model/layers/3/attn/q_proj/kernel", "model/layers/3"),
    ("model/layers/*", "model/layers", None),
    ("model/layers/*", "my/model/layers/3", None),
    ("model/layers/*", "model/layersx/3", None),
    ("layers/*", "model/layers/3", None),
    ("*", "token/embedding", "token"),
    ("**", "token/embedding", "token/embedding"),
    ("**/kernel", "kernel", "kernel"),
    ("**/kernel", "a/b/kernel", "a/b/kernel"),
    ("**/kernel", "a/b/kernels", None),
    ("a/**/b", "a/b", "a/b"),
    ("a/**/b", "a/x/y/b/c", "a/x/y/b"),
    ("a/**/b", "a/xb", None),
    ("*/mlp/*_proj", "7/mlp/up_proj/kernel", "7/mlp/up_proj"),
    ("*/mlp/*_proj", "7/mlp/up_proj2/kernel", None),
    ("h*", "h", "h"),
    ("h/*/mlp", "h//mlp", None),
    ("/blocks/*/", "blocks/0", "blocks/0"),
    ("blocks/1*", "blocks/10/mlp", "blocks/10"),
]

REGEXES = [
    ("kernel", "a/kernel/b", "kernel"),
    ("(q|k|v)_proj/kernel", "model/layers/3/attn/q_proj/kernel", "q_proj/kernel"),
    ("^layers", "model/layers", None),
    ("layers$", "model/layers", "layers"),
    (r"blocks/\d+", "x/blocks/12/mlp", "blocks/12"),
    ("blocks/[01]/.*kernel", "blocks/1/mlp/kernel", "blocks/1/mlp/kernel"),
    ("a.*b", "x/a/y/b/z", "a/y/b"),
]


@pytest.mark.parametrize(("text", "path", "found"), GLOBS + REGEXES)
def test_examples(text: str, path: str, found: str | None) -> None:
    pattern = Pattern(text)
    assert pattern.find(path) == found
    assert pattern.matches(path) == (found is not None)


@pytest.mark.parametrize(("text", "is_glob"), [*((t, True) for t, _, _ in GLOBS), *((t, False) for t, _, _ in REGEXES)])
def test_which_language(text: str, is_glob: bool) -> None:
    assert Pattern(text).is_glob == is_glob


def covered(glob: list[str], path: list[str]) -> bool:
    """Whether a glob covers a path, by trying every number of segments for ``**``."""
    if not glob:
        return True
    if glob[0] == "**":
        return any(covered(glob[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and segment_fits(glob[0], path[0]) and covered(glob[1:], path[1:])


def segment_fits(glob: str, text: str) -> bool:
    """Whether one segment fits: ``*`` alone stands for at least one character, within a name for any number."""
    if glob in ("", "*"):
        return bool(text) == bool(glob)
    if glob[0] == "*":
        return any(rest_fits(glob[1:], text[i:]) for i in range(len(text) + 1))
    return text[:1] == glob[0] and rest_fits(glob[1:], text[1:])


def rest_fits(glob: str, text: str) -> bool:
    return glob == "*" or segment_fits(glob, text)


NAMES = st.text("ab1_", min_size=1, max_size=3)
SEGMENTS = st.one_of(
    st.just("*"), st.just("**"), NAMES, st.builds("{}*{}".format, NAMES, NAMES), NAMES.map("*{}".format)
)
GLOB_TEXTS = st.lists(SEGMENTS, min_size=1, max_size=4).filter(lambda s: any("*" in x for x in s))
PATHS = st.lists(NAMES, min_size=1, max_size=5)


@given(GLOB_TEXTS, PATHS)
def test_globs_cover_what_walking_the_segments_covers(glob: list[str], path: list[str]) -> None:
    pattern = Pattern("/".join(glob))
    assert pattern.is_glob
    assert pattern.matches("/".join(path)) == covered(glob, path)


@given(GLOB_TEXTS, PATHS, PATHS)
def test_a_glob_covers_everything_below_and_finds_whole_segments(
    glob: list[str], path: list[str], below: list[str]
) -> None:
    pattern, text = Pattern("/".join(glob)), "/".join(path)
    found = pattern.find(text)
    if found is not None:
        assert found.split("/") == path[: found.count("/") + 1]
        assert pattern.matches(f"{text}/{'/'.join(below)}")


@given(st.text("ab/.+()", min_size=1, max_size=6), st.lists(NAMES, min_size=1, max_size=4))
def test_everything_else_is_searched_as_a_regular_expression(text: str, path: list[str]) -> None:
    whole = "/".join(path)
    try:
        expected = re.search(text, whole)
    except re.error:
        with pytest.raises(PlanError, match="is no regular expression"):
            Pattern(text)
        return
    assert Pattern(text).find(whole) == (expected and expected.group(0))


BAD = {
    "(q|k": """\
Plan(params=) rule 2: '(q|k' is no regular expression: missing ), unterminated subpattern at position 0.
  Mend: '\\\\(q\\\\|k', or a glob""",
    "a{99999999999999}": """\
Plan(params=) rule 2: 'a{99999999999999}' is no regular expression: the repetition number is too large.
  Mend: 'a\\\\{99999999999999\\\\}', or a glob""",
    "": """\
Plan(params=) rule 2: a pattern is a text, not ''.
  Mend: "blocks/*" or r"kernel$\"""",
    3: """\
Plan(params=) rule 2: a pattern is a text, not 3.
  Mend: "blocks/*" or r"kernel$\"""",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Pattern(text, "Plan(params=) rule 2")
    assert str(caught.value) == BAD[text]


def test_patterns_are_values() -> None:
    assert Pattern("a/*", "here") == Pattern("a/*", "there")
    assert len({Pattern("a/*"), Pattern("a/*"), Pattern("b/*")}) == 2


def test_the_nearest_names_are_distinct() -> None:
    assert nearest("blocks/0/atn", ["blocks/0/attn", "blocks/0/attn", "head"]) == ["blocks/0/attn"]
    assert nearest("zzz", ["blocks", "head"]) == []


def test_paths_of_leaves() -> None:
    tree = {"a": [np.zeros(1), (np.zeros(1),)], "b": 1}
    assert leaf_paths(tree) == ["a/0", "a/1/0", "b"]
    assert leaf_paths(np.zeros(1)) == [""]
    assert leaf_paths({}) == []
