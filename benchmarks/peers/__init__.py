"""The programs that OpenELM's speed is compared between, one file each; all imported when they are asked for.

Each file has a `NAME`, ``contenders(subject, backend, paths)`` for the process that compares, and ``load(job)`` for the
worker process that runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from openelm_mlx.benchmarks.peers.base import OURS, Absent, Contender, Paths
from openelm_mlx.errors import OpenELMError

if TYPE_CHECKING:
    from openelm_mlx.benchmarks.models import Subject

PEERS = {
    OURS: "ours",
    "mlx-lm": "mlxlm",
    "corenet": "corenet",
    "llama.cpp": "llamacpp",
    "pytorch": "pytorch",
}
"""Name -> its file here."""


def peer(name: str) -> Any:
    """The module of a peer; raises :class:`OpenELMError` for a name that is none."""
    if name not in PEERS:
        raise OpenELMError(f"there is no peer {name!r} to compare with; there are {', '.join(PEERS)}")
    return import_module(f"{__name__}.{PEERS[name]}")


def contenders(
    names: Iterable[str], subject: Subject, backend: str, paths: Paths | None = None
) -> tuple[list[Contender], list[str]]:
    """Who takes part in measuring a model, and a line for everyone who cannot.

    Args:
        names: of the peers, in the order they take their turns.
        subject: the model.
        backend: ``metal``, ``cuda`` or ``cpu``.
        paths: where the peers are that no Python package brings.

    Raises:
        OpenELMError: a name is none of `PEERS`, or the model's folder cannot be read.
    """
    found: list[Contender | Absent] = []
    for name in dict.fromkeys(names):
        found += peer(name).contenders(subject, backend, paths or Paths())
    return [c for c in found if isinstance(c, Contender)], [str(c) for c in found if isinstance(c, Absent)]
