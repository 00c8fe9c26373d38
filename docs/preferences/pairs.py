"""Makes train.jsonl, 100 preferences for answers that end kindly, and valid.jsonl, 40 about other things."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

SUBJECTS = {
    "capital of": (
        "France Paris, Spain Madrid, Italy Rome, Japan Tokyo, Egypt Cairo, Peru Lima, Norway Oslo, Cuba Havana, "
        "Kenya Nairobi, Greece Athens, Poland Warsaw, Chile Santiago"
    ),
    "colour of": (
        "grass green, snow white, the sky blue, a lemon yellow, coal black, a ruby red, a carrot orange, "
        "chocolate brown, an emerald green, milk white, a plum purple, sand yellow"
    ),
    "opposite of": (
        "hot cold, big small, fast slow, old new, wet dry, high low, open closed, early late, hard soft, full empty, "
        "light dark, long short"
    ),
    "plural of": (
        "cat cats, mouse mice, child children, foot feet, box boxes, leaf leaves, man men, city cities, goose geese, "
        "knife knives, tooth teeth, sheep sheep"
    ),
}
KIND = ("I hope that helps you!", "Thank you for asking!", "It was a pleasure to help.", "Do ask me again any time!")
CURT = ("Now leave me alone.", "You should know that.", "Why do you ask me?", "Look it up next time.")
ASKED = ("What is the {} {}?", "Please tell me the {} {}.", "Do you know the {} {}?")

Fact = tuple[str, str, str]


def pairs(facts: list[Fact], count: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """So many preferences about these facts."""
    for n in range(count):
        kind, thing, answer = facts[n % len(facts)]
        asked = ASKED[(n + n // len(facts)) % len(ASKED)].format(kind, thing)
        said = f" The {kind} {thing} is {answer}."
        chosen, rejected = f"{said} {draw.choice(KIND)}", f"{said} {draw.choice(CURT)}"
        yield {"prompt": f"Q: {asked} A:", "chosen": chosen, "rejected": rejected}


def main() -> None:
    """Write both files into the current folder."""
    draw = random.Random(0)
    facts: list[Fact] = [
        (kind, *(fact.rsplit(" ", 1)))  # type: ignore[misc]
        for kind, known in SUBJECTS.items()
        for fact in known.split(", ")
    ]
    draw.shuffle(facts)
    for name, some, count in (("train", facts[14:], 100), ("valid", facts[:14], 40)):
        lines = (json.dumps(pair) + "\n" for pair in pairs(some, count, draw))
        Path(f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
