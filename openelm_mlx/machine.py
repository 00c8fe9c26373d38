"""What machine this is, and in which state. Never the host's or the user's name."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from openelm_mlx import device
from openelm_mlx.version import __version__

_PACKAGES = ("mlx", "mlx-lm", "numpy")
_VARIABLES = re.compile(r"OPENBLAS_.*|OMP_NUM_THREADS|OPENELM_BLAS|MLX_.*")
_CPUINFO = Path("/proc/cpuinfo")
_TIMEOUT = 5.0
"""Seconds a system tool may take to answer."""
_POWER_MODES = {"0": "automatic", "1": "low power", "2": "high power"}
"""``powermode`` of ``pmset -g``; ``lowpowermode``, on other Macs, is the first two of them."""


def machine() -> dict[str, Any]:
    """Hardware, system, software and state, as plain values for JSON; None for what cannot be known."""
    backend = device.backend()
    return {
        "chip": _chip(),
        "cores": cores(),
        "memory_bytes": _memory_bytes(),
        "gpu": None if backend == "cpu" else _gpu(),
        "os": "macOS" if sys.platform == "darwin" else platform.system(),
        "os_version": _os_version(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "versions": {"openelm-mlx": __version__, **{name: _version(name) for name in _PACKAGES}},
        "backend": backend,
        "blas": device.blas() if backend == "cpu" else None,
        "load_average": load_average(),
        "power": _power() if sys.platform == "darwin" else None,
        "environment": {k: without_home(v) for k, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(k)},
    }


def cores() -> int:
    """Cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> list[float] | None:
    """Of the last 1, 5 and 15 minutes."""
    try:
        return list(os.getloadavg())
    except OSError:
        return None


def without_home(text: str) -> str:
    """`text` with the path of the user's home folder, wherever it stands in it, written as ``~``."""
    with suppress(RuntimeError):  # no home folder
        home = Path.home()
        for folder in {home, home.resolve()}:
            if folder != folder.parent:
                text = re.sub(re.escape(str(folder)) + r"(?![\w.-])", "~", text)
    return text


def slug(values: Mapping[str, Any]) -> str:
    """Chip and system of what :func:`machine` gave, fit for a file's name: ``apple-m2-max-macos-arm64``."""
    chip = re.sub(r"\((R|TM)\)|@.*|\b(CPU|Processor|\d+-Core)\b", " ", str(values["gpu"] or values["chip"]))
    return re.sub(r"[^a-z0-9]+", "-", f"{chip} {values['os']} {values['architecture']}".lower()).strip("-")


def lines(values: Mapping[str, Any]) -> list[str]:
    """What :func:`machine` gave, for people."""
    chip = values["chip"] if values["gpu"] in (None, values["chip"]) else f"{values['chip']}, {values['gpu']}"
    memory = f", {values['memory_bytes'] / 1e9:,.1f} GB" if values["memory_bytes"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items() if version)
    blas = f", BLAS: {values['blas']}" if values["blas"] else ""
    load = values["load_average"]
    power = [f"{name} {value}" for name, value in (values["power"] or {}).items() if value]
    return [
        f"machine   {chip}, {values['cores']} cores{memory}, {values['os']} {values['os_version']}",
        f"software  {versions}, Python {values['python']}",
        f"backend   {values['backend']}{blas}",
        *([f"load      {load[0]:.2f} in the last minute"] if load else []),
        *([f"power     {', '.join(power)}"] if power else []),
    ]


def power_notes(values: Mapping[str, Any]) -> list[str]:
    """A line for everything about power and heat that lowers figures."""
    power = values["power"] or {}
    notes = []
    if power.get("source") == "Battery Power":
        notes.append("running on battery: figures may be lower than with the charger")
    if power.get("mode") == "low power":
        notes.append("low power mode is on: figures will be low")
    if power.get("thermal") not in (None, "no warning"):
        notes.append(f"macOS reports a thermal limit ({power['thermal']}): figures will be low")
    return notes


def _chip() -> str:
    """The processor's name; its architecture where the system does not tell the name (Linux on ARM)."""
    name = _output("sysctl", "-n", "machdep.cpu.brand_string") if sys.platform == "darwin" else _model_name()
    return (name or "").strip() or platform.machine()


def _model_name() -> str | None:
    with suppress(OSError):
        for line in _CPUINFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value
    return None


def _memory_bytes() -> int | None:
    if sys.platform == "darwin":
        size = _output("sysctl", "-n", "hw.memsize")
        return int(size) if size and size.strip().isdigit() else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _gpu() -> str | None:
    import mlx.core as mx

    name = mx.device_info().get("device_name")
    return str(name) if name else None


def _os_version() -> str:
    if sys.platform == "darwin":
        return platform.mac_ver()[0]
    kernel = platform.release().split("-")[0]  # what follows may be a name somebody gave it
    with suppress(OSError, AttributeError, KeyError):
        return f"{kernel} ({platform.freedesktop_os_release()['PRETTY_NAME']})"
    return kernel


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _power() -> dict[str, str | None]:
    """Where a Mac's power comes from, its energy mode, and whether heat limits it, as ``pmset`` tells."""
    source = re.search(r"drawing from '([^']+)'", _output("pmset", "-g", "batt") or "")
    mode = re.search(r"^\s*(?:low)?powermode\s+(\d)", _output("pmset", "-g") or "", re.MULTILINE)
    return {
        "source": source[1] if source else None,
        "mode": _POWER_MODES.get(mode[1]) if mode else None,
        "thermal": _thermal(_output("pmset", "-g", "therm") or ""),
    }


def _thermal(text: str) -> str | None:
    """``no warning``, or the limits and warning levels that ``pmset -g therm`` lists; None when it says nothing."""
    found = []
    for name, number in re.findall(r"(\w[\w ]*?)[ \t]*=[ \t]*(\d+)", text):
        # CPU_Speed_Limit = 70 (percent); Thermal Warning Level = 5 (0: normal, 255: unknown).
        limited = name.endswith("_Limit") and int(number) < 100
        if limited or (name.lower().endswith("warning level") and number not in ("0", "255")):
            found.append(f"{name} {number}")
    return ", ".join(found) or ("no warning" if text.strip() else None)


def _output(*command: str) -> str | None:
    """What a system tool prints; None when it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")
