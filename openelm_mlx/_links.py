"""convert, finetune and benchmarks are folders at the root of the checkout, linked into the package."""

from __future__ import annotations

import os
from pathlib import Path

LINKED = ("benchmarks", "convert", "finetune")


def check_links(package_dir: Path) -> None:
    """Say in one line what is wrong in a checkout whose links became text files.

    Git without symbolic links writes a link as a small file that holds its target, and Python then finds no module.
    Three looks at the disk; in an installed package, where the three are plain folders, nothing is wrong.

    Args:
        package_dir: the folder ``openelm_mlx``.

    Raises:
        ImportError: one of the three is a file.
    """
    for name in LINKED:
        if os.path.isfile(package_dir / name):  # noqa: PTH113 (cheaper than Path.is_file on the way to a verb)
            raise ImportError(
                f"{package_dir / name} is a text file instead of a link to ../{name}: this checkout was made without "
                "symbolic links. On macOS or Linux, in the checkout: "
                "git config core.symlinks true && git checkout -- openelm_mlx"
            )
