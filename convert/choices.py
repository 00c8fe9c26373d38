"""What can be chosen when converting, and the defaults: the same objects for Python and the command line.

Imports nothing heavy, so that ``openelm --help`` can show them at once.
"""

from __future__ import annotations

from openelm_mlx.errors import OpenELMError

PRECISIONS = ("bf16", "fp16", "fp32", "4bit", "8bit")
GROUP_SIZES = (32, 64, 128)
DEFAULT_PRECISION = "bf16"
DEFAULT_GROUP_SIZE = 64


def check_precision(name: str, group_size: int) -> None:
    """Refuse a name or a group size that is not known.

    Raises:
        OpenELMError: with the ones that are.
    """
    if name not in PRECISIONS:
        raise OpenELMError(f"precision {name!r} is not known; use one of {', '.join(PRECISIONS)}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size not in GROUP_SIZES:
        raise OpenELMError(f"group size {group_size} is not known; use one of {', '.join(map(str, GROUP_SIZES))}")
