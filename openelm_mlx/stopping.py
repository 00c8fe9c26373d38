"""Stop strings: ending generated text at a given string, however the text arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from openelm_mlx.errors import OpenELMError


class StopStrings:
    """Passes text through until one of the stop strings is complete, and never emits any part of that one.

    The stop string that is complete first ends the text; of those complete at the same character, the longest. The
    result is therefore the same whatever pieces the text is fed in. A single string is taken as one stop string.

    Raises:
        OpenELMError: a stop string is empty (it would end every text before its first character) or not a string.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        if not isinstance(stops, Iterable):
            raise OpenELMError(f"stop strings are a string or several, not {stops!r}")
        strings = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in strings:
            if not isinstance(stop, str):
                raise OpenELMError(f"a stop string must be a string, not {stop!r}")
            if not stop:
                raise OpenELMError("a stop string is empty: it would end every text at once; leave it out")
        self._stops = tuple(dict.fromkeys(strings))
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Take the next piece of text; return what may be shown now and whether a stop string has been reached.

        After a stop string everything fed is dropped and the answer stays ``("", True)``.
        """
        if self.stopped:
            return "", True
        self._held += text
        cut = self._find()
        if cut is not None:
            shown, self._held, self.stopped = self._held[:cut], "", True
            return shown, True
        keep = len(self._held) - self._possible_beginning()
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown, False

    def flush(self) -> str:
        """The text still held back when generation ends for another reason (it turned out to be no stop string)."""
        shown, self._held = self._held, ""
        return shown

    def _find(self) -> int | None:
        """Where to cut: the start of the stop string that is complete first."""
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that a stop string could begin with."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
