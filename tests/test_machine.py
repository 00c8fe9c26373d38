"""The machine: what is told of it, and that no names are."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx import device, machine
from tests.benchmarks.made import MACHINE


def system_tools(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> None:
    """Let the programs answer this; those that are not named are not there."""

    def run(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[bytes]:
        if " ".join(command) not in answers:
            raise FileNotFoundError
        return subprocess.CompletedProcess(command, 0, answers[" ".join(command)].encode())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "platform", "darwin")


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "cpu")
    values = machine.machine()
    assert values == json.loads(json.dumps(values))
    assert set(values) == set(MACHINE)
    assert values["chip"]
    assert values["cores"] >= 1
    assert values["memory_bytes"] > 1e9
    assert (values["backend"], values["gpu"], values["blas"]) == ("cpu", None, device.blas())
    assert values["versions"]["mlx"]
    assert len(values["load_average"]) == 3


def test_no_names_of_host_and_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "bob"))
    monkeypatch.setenv("MLX_METAL_PATH", f"{tmp_path}/bob/lib:{tmp_path}/bobby")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-made-by-bob")
    values = machine.machine()
    assert values["environment"]["MLX_METAL_PATH"] == f"~/lib:{tmp_path}/bobby"
    del values["environment"]
    told = json.dumps(values)
    assert not re.search(rf"\b{re.escape(platform.node())}\b", told)
    assert "bob" not in told


def test_the_environment_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    for name in ("OMP_NUM_THREADS", "OPENELM_BLAS", "MLX_X", "HF_TOKEN", "OMP_NUM_THREADS_X"):
        monkeypatch.setenv(name, "2")
    told = machine.machine()["environment"]
    assert told["OPENBLAS_CORETYPE"] == "Haswell"
    assert {"OMP_NUM_THREADS", "OPENELM_BLAS", "MLX_X"} < set(told)
    assert not {"HF_TOKEN", "OMP_NUM_THREADS_X", "HOME", "PATH"} & set(told)


@pytest.mark.parametrize(("home", "shown"), [("/", "/x/y"), ("/x", "~/y"), ("/x/y", "~"), ("/x/", "~/y")])
def test_the_home_folder(monkeypatch: pytest.MonkeyPatch, home: str, shown: str) -> None:
    monkeypatch.setenv("HOME", home)
    assert machine.without_home("/x/y") == shown
    assert machine.without_home("--out=/x/y") == f"--out={shown}"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_chip_on_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine._chip() == platform.machine()
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel\t: 1\nmodel name\t: AMD EPYC 7B13\n\nmodel name\t: x\n")
    assert machine._chip() == "AMD EPYC 7B13"


def test_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "sysctl -n machdep.cpu.brand_string": "Apple M2 Max\n",
        "sysctl -n hw.memsize": "68719476736\n",
        "pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t80%; discharging\n",
        "pmset -g": "System-wide power settings:\nCurrently in use:\n standby     1\n lowpowermode         1\n",
        "pmset -g therm": "Note: No thermal warning level has been recorded\n",
    }
    system_tools(monkeypatch, answers)
    values = machine.machine()
    assert (values["chip"], values["memory_bytes"], values["os"]) == ("Apple M2 Max", 68719476736, "macOS")
    assert values["power"] == {"source": "Battery Power", "mode": "low power", "thermal": "no warning"}
    assert machine.power_notes(values) == [
        "running on battery: figures may be lower than with the charger",
        "low power mode is on: figures will be low",
    ]


def test_a_mac_whose_tools_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    system_tools(monkeypatch, {})
    values = machine.machine()
    assert (values["chip"], values["memory_bytes"]) == (platform.machine(), None)
    assert values["power"] == {"source": None, "mode": None, "thermal": None}
    assert machine.power_notes(values) == []
    assert all(line.isprintable() and "None" not in line for line in machine.lines(values))


def test_a_tool_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TIMEOUT", 0.05)
    assert machine._output(sys.executable, "-c", "import time; time.sleep(20)") is None
    assert machine._output(sys.executable, "-c", "import sys; print(1); sys.exit(1)") is None


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("Note: No thermal warning level has been recorded\nNote: No performance warning level ...\n", "no warning"),
        ("CPU Power notify\n\tCPU_Available_CPUs \t= 12\n\tCPU_Speed_Limit \t= 100\n", "no warning"),
        ("\tCPU_Scheduler_Limit \t= 100\n\tCPU_Speed_Limit \t= 70\n", "CPU_Speed_Limit 70"),
        ("Thermal Warning Level = 5\nPerformance Warning Level = 0\n", "Thermal Warning Level 5"),
        ("", None),
    ],
)  # fmt: skip
def test_the_thermal_state(text: str, state: str | None) -> None:
    assert machine._thermal(text) == state
    limited = state not in (None, "no warning")
    assert len(machine.power_notes({"power": {"thermal": state}})) == limited


@pytest.mark.parametrize(("value", "mode"), [("0", "automatic"), ("1", "low power"), ("2", "high power"), ("7", None)])
def test_the_energy_mode(monkeypatch: pytest.MonkeyPatch, value: str, mode: str | None) -> None:
    system_tools(monkeypatch, {"pmset -g": f" sleep 1\n powermode            {value}\n"})
    assert machine.machine()["power"]["mode"] == mode


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "apple-m2-max-macos-arm64"),
        ({"chip": "AMD EPYC", "gpu": None, "os": "Linux", "architecture": "x86_64"}, "amd-epyc-linux-x86-64"),
        ({"chip": "Intel(R) Xeon(R) CPU @ 2.20GHz", "gpu": None}, "intel-xeon-macos-arm64"),
        ({"chip": "AMD EPYC 7B13 64-Core Processor", "gpu": None}, "amd-epyc-7b13-macos-arm64"),
        ({"gpu": "NVIDIA H200", "os": "Linux", "architecture": "x86_64"}, "nvidia-h200-linux-x86-64"),
        ({"chip": "../../x/$(y)", "gpu": None}, "x-y-macos-arm64"),
    ],
)
def test_the_name_in_file_names(changes: dict[str, Any], name: str) -> None:
    assert machine.slug({**MACHINE, **changes}) == name


def test_the_lines() -> None:
    assert machine.lines(MACHINE) == [
        "machine   Apple M2 Max, 12 cores, 68.7 GB, macOS 14.4.1",
        "software  openelm-mlx 0.1.0, mlx 0.32.4, Python 3.12.1",
        "backend   metal",
        "load      1.50 in the last minute",
        "power     source AC Power, mode automatic, thermal no warning",
    ]
    server = {**MACHINE, "gpu": "NVIDIA H200", "chip": "Intel", "blas": None, "load_average": None, "power": None}
    assert machine.lines(server)[0].startswith("machine   Intel, NVIDIA H200, 12 cores")
    assert len(machine.lines(server)) == 3
    assert machine.lines({**server, "backend": "cpu", "blas": "OpenBLAS"})[2] == "backend   cpu, BLAS: OpenBLAS"
