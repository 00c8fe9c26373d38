"""Regular expressions for layers' names, which may come from a stranger's file: only those that cannot hang."""

from __future__ import annotations

import re
from typing import Any

from openelm_mlx.errors import OpenELMError

try:
    from re import _parser  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # Python 3.10
    import sre_parse as _parser  # type: ignore[no-redef, unused-ignore]

LONGEST = 200
"""Characters; the longest path of a layer has 40."""

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def layer_pattern(text: str, form: str = "{}") -> re.Pattern[str]:
    """A layer's name or a regular expression, compiled.

    A repeated group with a repetition in it, such as ``(.+)+``, is refused: Python tries every way to share a name out
    among the two, and their number doubles with every character.

    Args:
        text: what a person or a file gives.
        form: the expression it is a part of; ``{}`` stands for it.

    Raises:
        OpenELMError: it is too long, no regular expression, or one that can hang.
    """
    if len(text) > LONGEST:
        raise OpenELMError(
            f"{text[:40] + '...'!r} is too long for a layer's name or a pattern: over {LONGEST} characters"
        )
    try:
        alone = _parser.parse(text)
        compiled = re.compile(form.replace("{}", text))
    except (re.error, OverflowError, RecursionError) as e:
        raise OpenELMError(f"{text!r} is neither a layer's name nor a regular expression: {e}") from None
    if _repeats_a_repetition(alone, inside=False):
        raise OpenELMError(
            f"{text!r} repeats a group that has a repetition in it, which can take forever; leave one of the two out"
        )
    return compiled


def _repeats_a_repetition(part: Any, *, inside: bool) -> bool:
    """Whether a part of a parsed expression does; `inside`: that part is repeated."""
    if isinstance(part, tuple) and part and str(part[0]) in _REPEATS:
        least, most, repeated = part[1]
        if inside and least != most:
            return True
        return _repeats_a_repetition(repeated, inside=inside or most > 1)
    if isinstance(part, (tuple, list, _parser.SubPattern)):
        return any(_repeats_a_repetition(p, inside=inside) for p in part)
    return False
