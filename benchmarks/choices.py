"""What can be asked of ``openelm bench``, and what comes of it: which models, how long, beside whom.

Imports nothing heavy, so that ``openelm bench --help`` can show it at once.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from openelm_mlx.benchmarks.peers import PEERS
from openelm_mlx.benchmarks.peers.base import OURS
from openelm_mlx.benchmarks.protocol import PROTOCOLS, Protocol
from openelm_mlx.benchmarks.trainers import COMPARED
from openelm_mlx.errors import OpenELMError

THRESHOLD = 0.10
"""Part of a speed that may be lost before it counts as a slowdown."""

PEER_NAMES = tuple(name for name in PEERS if name != OURS)

DEFAULT_PROTOCOL = "paper"

TRAINERS_HELP = "; ".join(f"{name}: {what}" for name, what in COMPARED.items()) + "."

PROTOCOLS_HELP = "; ".join(
    [f"{name}: {p.prompt_tokens} + {p.gen_tokens} tokens, {p.repeats} runs" for name, p in PROTOCOLS.items()]
    + [f"{DEFAULT_PROTOCOL} by default."]
)


@dataclass(frozen=True)
class Case:
    """One model, and the ways it is run."""

    model: str
    random_weights: bool
    precision: str | None
    protocols: tuple[Protocol, ...]


@dataclass(frozen=True)
class Suite:
    """A fixed set of cases."""

    help: str
    models: tuple[str, ...]
    prompt_tokens: Mapping[str, tuple[int, ...]]
    """Precision -> lengths of prompts."""
    protocol: Protocol
    peers: tuple[str, ...] = ()


SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "paper": Suite(
            "all four sizes in bf16 and 4bit, with random weights",
            ("OpenELM-270M", "OpenELM-450M", "OpenELM-1_1B", "OpenELM-3B"),
            MappingProxyType({"bf16": (36,), "4bit": (36,)}),
            PROTOCOLS["paper"],
        ),
        "mlx-lm": Suite(
            "OpenELM-270M in bf16, 4bit and fp32 beside mlx-lm, with random weights",
            ("OpenELM-270M",),
            # mlx-lm on a CPU reads a prompt in 4 bits at about one token a second: a long one would take a day.
            MappingProxyType({"bf16": (36, 512), "4bit": (36,), "fp32": (36,)}),
            Protocol(gen_tokens=33, repeats=5, dry_run=False, time_limit=30),
            ("mlx-lm",),
        ),
    }
)


@dataclass(frozen=True)
class Plan:
    """What a command asks for."""

    name: str
    """For the result's file."""
    cases: tuple[Case, ...]
    peers: tuple[str, ...]


def plan(
    suite: str | None,
    *,
    model: str | None,
    random_weights: bool,
    precision: str | None,
    compare: str | None,
    protocol: str | None,
    prompt_tokens: str | None,
    **changes: Any,
) -> Plan:
    """The plan of a command's options; `changes` are those of the protocol, None where not given.

    Raises:
        OpenELMError: the options contradict one another, or a value is not known.
    """
    peers = () if compare is None else names(compare)
    for peer in peers:
        if peer not in PEER_NAMES:
            raise OpenELMError(f"--compare {peer}: there is no such program; there are {', '.join(PEER_NAMES)}")
    changes = {key: value for key, value in changes.items() if value is not None}
    asked = None if prompt_tokens is None else lengths(prompt_tokens)
    if suite is None:
        if model is None:
            raise OpenELMError(f"random weights need a size: --model OpenELM-270M, or a --suite ({', '.join(SUITES)})")
        base = _protocol(protocol or DEFAULT_PROTOCOL)
        precisions: tuple[str | None, ...] = ("bf16",) if random_weights else (None,)
        if precision is not None:
            precisions = names(precision)
        runs = _runs(base, asked or (base.prompt_tokens,), changes)
        # A folder's own name may have commas. os.path: a name too long for a file is False, not an exception.
        models = (model,) if os.path.exists(model) else names(model)  # noqa: PTH110
        cases = tuple(Case(one, random_weights, p, runs) for one in models for p in precisions)
        return Plan(models[0], cases, peers)
    if suite not in SUITES:
        raise OpenELMError(f"there is no suite {suite!r}; there are {', '.join(SUITES)}")
    if model or random_weights:
        raise OpenELMError("a --suite names its models itself: leave out --model and --random-weights")
    found = SUITES[suite]
    base = _protocol(protocol) if protocol else found.protocol
    chosen = tuple(found.prompt_tokens) if precision is None else names(precision)
    for one in chosen:
        if one not in found.prompt_tokens:
            raise OpenELMError(f"suite {suite} has the precisions {', '.join(found.prompt_tokens)}, not {one}")
    cases = tuple(
        Case(size, True, p, _runs(base, asked or found.prompt_tokens[p], changes))
        for size in found.models
        for p in chosen
    )
    return Plan(suite, cases, peers or found.peers)


_ONE_STEP = ("explain", "model", "random_weights", "precision", "suite", "json_file", "quiet")
"""Options that mean something where a decode step is explained instead of speeds measured."""

_NEEDED_BY = {"corenet": "corenet", "llama_bench": "llama.cpp", "gguf": "llama.cpp", "torch_python": "pytorch"}
"""Paths of peers that have to be compared with for the path to mean anything."""


def check_together(given: Collection[str], peers: Sequence[str], threshold: float = THRESHOLD) -> None:
    """Refuse options that would change nothing beside the others.

    Args:
        given: names of the options that were given.
        peers: those that are compared with.
        threshold: of ``--against``.

    Raises:
        OpenELMError: the message names the option.
    """
    if "threshold" in given and "against" not in given:
        raise OpenELMError("--threshold goes with --against")
    check_threshold(threshold)
    if "explain" in given:
        for name in sorted(set(given) - set(_ONE_STEP)):
            raise OpenELMError(f"--explain looks into one decode step and has no use for {_option(name)}")
    for name, peer in _NEEDED_BY.items():
        if name in given and peer not in peers:
            raise OpenELMError(f"{_option(name)} goes with --compare {peer}")
    if {"json_file", "out"} <= set(given):
        raise OpenELMError("--json and --out both say where the result is kept: leave out one of them")


def check_threshold(threshold: float) -> None:
    """Refuse what is no part of a speed; raises :class:`OpenELMError`."""
    if not 0 <= threshold < 1:
        raise OpenELMError(f"--threshold must be a part of the speed, from 0 to below 1, not {threshold!r}")


def check_nothing_for_a_verb(given: Collection[str], verb: str) -> None:
    """Refuse options of ``openelm bench`` itself before one of its verbs, which has its own."""
    for name in sorted(given):
        raise OpenELMError(f"{_option(name)} stands before {verb} and would be lost: write it behind {verb}")


def _option(name: str) -> str:
    return f"--{name.removesuffix('_file').replace('_', '-')}"


def _protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise OpenELMError(f"there is no protocol {name!r}; there are {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def _runs(base: Protocol, prompts: tuple[int, ...], changes: Mapping[str, Any]) -> tuple[Protocol, ...]:
    return tuple(dataclasses.replace(base, prompt_tokens=length, **changes) for length in prompts)


def trainers(text: str | None) -> tuple[str, ...]:
    """What fine-tuning is compared with; raises :class:`OpenELMError` for a name that is none."""
    found = () if text is None else names(text)
    for name in found:
        if name not in COMPARED:
            raise OpenELMError(f"--compare {name}: there is no such trainer; there are {', '.join(COMPARED)}")
    return found


def span(text: str | None) -> tuple[int, int] | None:
    """Two lengths, such as 20-256."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})-(\d{1,6})", text.strip())
    if match is None:
        raise OpenELMError(f"--ragged {text}: expected two lengths, such as 20-256")
    return int(match[1]), int(match[2])


def names(text: str) -> tuple[str, ...]:
    """The words of a list with commas, each once."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise OpenELMError(f"{text!r} names nothing")
    return found


def lengths(text: str) -> tuple[int, ...]:
    """The numbers of a list with commas."""
    try:
        return tuple(int(word) for word in names(text))
    except ValueError:
        raise OpenELMError(f"--prompt-tokens {text}: expected numbers, several with commas") from None
