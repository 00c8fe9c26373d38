"""What all peers have in common. Imports nothing but the standard library, so that any Python can run a worker."""

from __future__ import annotations

import ctypes
import dataclasses
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from openelm_mlx.benchmarks.protocol import Timing
from openelm_mlx.device import OPENBLAS
from openelm_mlx.errors import OpenELMError

if TYPE_CHECKING:
    from openelm_mlx.benchmarks.models import Subject

OURS = "openelm-mlx"
STOCK = "stock"
WITH_OPENBLAS = "float32, OpenBLAS"


class LeftOut(OpenELMError):
    """A peer cannot take part; the message says why."""


@dataclass(frozen=True)
class Absent:
    """Someone who cannot take part."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: left out: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Where the peers are that are no packages of this Python."""

    corenet: Path | None = None
    """A checkout of Apple's CoreNet."""
    llama_bench: Path | None = None
    """llama.cpp's benchmark program."""
    gguf: Path | None = None
    """The model as llama.cpp reads it."""
    torch_python: Path | None = None
    """A Python that has PyTorch; by default this one, if it has it."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A peer in one of its settings."""

    peer: str
    variant: str = STOCK
    """How it is set up; ``stock``: as it comes."""
    dtype: str | None = None
    """What its weights are brought to; None: as the peer itself loads them."""
    openblas: bool = False
    """Whether the system's OpenBLAS is loaded before MLX."""
    path: str | None = None
    """CoreNet's checkout, or the program llama-bench."""
    gguf: str | None = None
    """The model file of llama.cpp."""
    python: str | None = None
    """The Python its worker runs in; None: this one."""

    @property
    def name(self) -> str:
        """What lines call it."""
        return self.peer if self.variant == STOCK else f"{self.peer} ({self.variant})"

    @property
    def preloads(self) -> bool:
        """Whether importing `openelm_mlx` may load its BLAS: not for others, who run as they would without us."""
        return self.peer == OURS


@dataclass(frozen=True)
class Job:
    """What a worker loads."""

    contender: Contender
    subject: dict[str, Any]
    """:meth:`Subject.to_json`: that class needs MLX, which PyTorch's Python need not have."""
    config: dict[str, Any]
    """:meth:`OpenELMConfig.to_dict` of the model."""
    backend: str
    """``metal``, ``cuda`` or ``cpu``."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """The inverse of :meth:`to_json`."""
        return cls(**{**values, "contender": Contender(**values["contender"])})

    @property
    def folder(self) -> Path | None:
        """The model's, if it is no preset."""
        return Path(self.subject["folder"]) if self.subject["folder"] else None


@dataclass(frozen=True)
class Description:
    """What a peer says of itself and the model it loaded."""

    dtype: str
    """What it computes in."""
    weight_bytes: int | None
    """Bytes of weights read for a token; None: not known."""
    kv_bytes_per_token: int | None
    """Bytes of keys and values that a position takes."""
    vocab_size: int
    """Entries of the vocabulary."""
    blas: str
    """What multiplies its matrices, in words."""
    versions: dict[str, str]
    """Of its programs and libraries, by name."""


@dataclass(frozen=True)
class Run:
    """One generation."""

    timing: Timing
    tokens: list[int]
    """What was generated; empty for a peer that does not tell."""
    peak_memory_gb: float
    """Most memory the peer held, in units of 1e9 bytes: what MLX or CUDA allocated, the whole process elsewhere."""


class Loaded(Protocol):
    """A peer with its model, ready to run."""

    def describe(self) -> Description:
        """What it is; called after a first run."""

    def run(self, ids: Sequence[int], gen_tokens: int, time_limit: float | None) -> Run:
        """Generate greedily after a prompt, whatever is said about the end; at most `time_limit` seconds."""


def load_openblas() -> str:
    """Load the system's OpenBLAS, which has to come before MLX; says which.

    Raises:
        LeftOut: there is none.
    """
    assert "mlx.core" not in sys.modules
    try:
        ctypes.CDLL(OPENBLAS, ctypes.RTLD_GLOBAL)
    except OSError:
        raise LeftOut(f"no {OPENBLAS} on this machine (on Debian: apt-get install libopenblas0-pthread)") from None
    return f"OpenBLAS ({OPENBLAS})"


def packed_bits(subject: Subject) -> int | None:
    """Bits of a model's packed layers; None if it has none.

    Raises:
        OpenELMError: its folder cannot be read, or its precision is not known.
    """
    from openelm_mlx.benchmarks.models import stored_as
    from openelm_mlx.loading import read_model_config

    if subject.folder is not None:
        bits = read_model_config(subject.folder).get("quantization", {}).get("bits")
        return bits if isinstance(bits, int) else None
    return stored_as(subject.precision)[1]


def last_line(said: str) -> str:
    """What a program that failed said last; empty if it said nothing."""
    return said.strip().rpartition("\n")[2].strip()


def process_peak_gb(who: int) -> float:
    """Most memory that this process (``resource.RUSAGE_SELF``) or one of its children held, in units of 1e9 bytes."""
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
