"""Whether other processes keep the machine busy while something is measured."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from openelm_mlx.machine import cores, load_average

_PROC = Path("/proc")

SAMPLE_S = 0.5
"""Shortest stretch a share is taken over: the kernel counts in hundredths of a second."""

BUSY_SHARE = 0.1
"""Part of the cores from which others are worth a line; some background there always is."""

BUSY_LOAD = 0.5
"""Load average a core from which a machine that tells no more than that counts as busy; a Mac at rest has up to 0.3."""


@dataclass(frozen=True)
class Usage:
    """CPU seconds since some moment, over the cores this process may use."""

    at: float
    """When this was read, in seconds of a monotonic clock."""
    all_s: float
    """Of all processes; with what a virtual machine's host gave to others meanwhile."""
    stolen_s: float
    """The latter alone."""
    own_s: float
    """Of this process, those it started, and theirs."""


def usage() -> Usage | None:
    """How much was used so far; None where the system does not tell (it does on Linux)."""
    if sys.platform != "linux":
        return None
    tick = os.sysconf("SC_CLK_TCK")
    try:
        of_core = _ticks_of_cores()
        own = _ticks_of_tree(os.getpid())
    except (OSError, ValueError, IndexError):
        return None
    used = [of_core[core] for core in os.sched_getaffinity(0) if core in of_core]
    all_ticks, stolen = sum(a for a, _ in used), sum(s for _, s in used)
    return Usage(time.monotonic(), all_ticks / tick, stolen / tick, own / tick) if used else None


def busy() -> str | None:
    """A line when other processes keep the machine busy just now; None when they do not. Takes half a second.

    Where the system does not tell what is used, the load average decides.
    """
    before = usage()
    if before is not None:
        return busy_since(before)
    load, n = load_average(), cores()
    if load is None or load[0] < BUSY_LOAD * n:
        return None
    return f"the machine is busy: its load is {load[0]:.1f} on {n} cores; figures will be low and uneven"


def busy_since(before: Usage | None) -> str | None:
    """A line when other processes kept the machine busy since `before`, which :func:`usage` gave."""
    if before is None:
        return None
    time.sleep(max(0.0, before.at + SAMPLE_S - time.monotonic()))
    now, n = usage(), cores()
    if now is None:
        return None
    elapsed = now.at - before.at
    stolen = (now.stolen_s - before.stolen_s) / elapsed
    others = (now.all_s - before.all_s - (now.own_s - before.own_s)) / elapsed
    if others < BUSY_SHARE * n:
        return None
    who = "other processes and other virtual machines" if stolen > others / 4 else "other processes"
    return f"the machine is busy: {who} use {others:.1f} of {n} cores; figures will be low and uneven"


def _ticks_of_cores() -> dict[int, tuple[int, int]]:
    """Core -> ticks in use (stolen ones included), and stolen ones, from /proc/stat."""
    ticks = {}
    for line in (_PROC / "stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            # user nice system idle iowait irq softirq steal; guests are part of user and nice.
            user, nice, system, _, _, irq, softirq, stolen = map(int, values[:8])
            ticks[int(name[3:])] = (user + nice + system + irq + softirq + stolen, stolen)
    return ticks


def _ticks_of_tree(root: int) -> int:
    """Ticks of a process and all below it, those that have ended and were waited for included."""
    parent, ticks = {}, {}
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        fields = text[text.rindex(")") + 2 :].split()  # what stands before is the program's name, which may be anything
        parent[int(folder.name)] = int(fields[1])
        ticks[int(folder.name)] = sum(map(int, fields[11:15]))  # utime stime cutime cstime

    def in_tree(pid: int) -> bool:
        seen = set()
        while pid != root and pid in parent and pid not in seen:
            seen.add(pid)
            pid = parent[pid]
        return pid == root

    return sum(n for pid, n in ticks.items() if in_tree(pid))
