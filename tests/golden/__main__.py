"""``python -m tests.golden DIR [--only KIND]``: every golden file of a folder through the real converter."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.golden.kinds import KINDS, Outcome, check_folder


def main() -> int:
    """Print a line for each check; 1 if any misses, or if there was nothing to check."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--only", choices=[k.name for k in KINDS], metavar="KIND", help=", ".join(k.name for k in KINDS)
    )
    arguments = parser.parse_args()
    passed = missed = 0
    for outcome in check_folder(arguments.folder, arguments.only):
        if not isinstance(outcome, Outcome):
            print(f"--    {outcome}", flush=True)
            continue
        passed, missed = passed + outcome.ok, missed + (not outcome.ok)
        print(f"{'ok   ' if outcome.ok else 'MISS '} {outcome.name}: {outcome.detail}", flush=True)
    print(f"{passed} passed, {missed} failed")
    return 1 if missed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
