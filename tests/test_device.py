"""What the one place that asks about the machine answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from openelm_mlx import device
from tests.cpu.compiled import can_be_made
from tests.cpu.starts import FAST, has_openblas

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="preloads on Linux only")
GIB = 1 << 30


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    values = {k: v for k, v in os.environ.items() if k != device.BLAS_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**values, **environment}
    )


# Whether OpenBLAS's symbols, and the compiled library's, are found by libraries loaded later, as MLX's.
REPORT = """
import ctypes
import openelm_mlx
from openelm_mlx import device
print(device.blas())
print(hasattr(ctypes.CDLL(None), "openblas_get_config"))
print(hasattr(ctypes.CDLL(None), "openelm_blas_setup"))
"""


@LINUX
class TestBlas:
    @pytest.mark.skipif(not has_openblas(), reason="no OpenBLAS is installed")
    def test_the_systems(self) -> None:
        done = run(REPORT, **{device.BLAS_VARIABLE: "preload"})
        assert done.stdout.splitlines() == ["OpenBLAS (libopenblas.so.0, loaded before mlx)", "True", "False"]
        assert done.stderr == ""

    @pytest.mark.skipif(not can_be_made(), reason="needs cc, and the OpenBLAS of NumPy's wheel")
    @pytest.mark.parametrize("choice", [None, "auto", "shim"])
    def test_the_compiled_one_comes_first(self, choice: str | None) -> None:
        """And it alone: the system's OpenBLAS is not loaded as well."""
        done = run(REPORT, **({device.BLAS_VARIABLE: choice} if choice else {}))
        assert done.stdout.splitlines() == [FAST, "False", "True"]
        assert done.stderr == ""

    def test_it_is_left_out(self) -> None:
        done = run(REPORT, **{device.BLAS_VARIABLE: "none"})
        assert done.stdout.splitlines() == ["MLX's own", "False", "False"]
        assert done.stderr == ""

    def test_an_unknown_choice_is_said_and_means_auto(self) -> None:
        done, auto = run(REPORT, **{device.BLAS_VARIABLE: "fast"}), run(REPORT)
        assert done.stderr == "OPENELM_BLAS=fast: expected auto, shim, preload, none; using auto\n"
        assert done.stdout == auto.stdout

    def test_mlx_imported_first_is_too_late(self) -> None:
        done = run(f"import mlx.core\n{REPORT}")
        assert done.stdout.splitlines() == [
            "MLX's own, slow (mlx was imported before openelm_mlx, too late to load another)",
            "False",
            "False",
        ]

    @pytest.mark.parametrize("choice", ["auto", "shim", "preload"])
    def test_where_there_is_none(self, choice: str) -> None:
        """No library at all can be loaded; NumPy's is not even looked for when the system's is asked for."""
        code = (
            "import ctypes\nclass Gone:\n    def __init__(self, *args, **options): raise OSError('gone')\n"
            f"whole, ctypes.CDLL = ctypes.CDLL, Gone\nimport openelm_mlx\nctypes.CDLL = whole\n{REPORT}"
        )
        done = run(code, **{device.BLAS_VARIABLE: choice})
        assert done.stdout.startswith("MLX's own, slow (no libopenblas.so.0; on Debian: apt-get install")
        why = "NumPy's OpenBLAS cannot be used: gone"
        assert (f"; no compiled fast path: {why})" in done.stdout) == (choice != "preload")
        said = {"preload": "libopenblas.so.0 cannot be loaded; using MLX's own BLAS", "shim": why}
        assert done.stderr == (f"OPENELM_BLAS={choice}: {said[choice]}\n" if choice in said else "")

    def test_products_are_right_either_way(self) -> None:
        code = (
            "import openelm_mlx, numpy, mlx.core as mx\n"
            "a, b = (mx.random.normal((160, 160), key=mx.random.key(k)) for k in (1, 2))\n"
            "for x, y in ((a, b), (a[:3], b), (a[:3], b.T), (a, b.T)):\n"
            "    error = numpy.abs(numpy.asarray(x @ y) - numpy.asarray(x) @ numpy.asarray(y)).max()\n"
            "    assert error < (1e-4 if mx.default_device().type == mx.DeviceType.cpu else 1e-1), error\n"
        )
        for choice in ("shim", "preload", "none"):
            run(code, **{device.BLAS_VARIABLE: choice})

    def test_importing_does_nothing_else(self) -> None:
        code = "import sys, openelm_mlx; print([m for m in sys.modules if m.startswith(('mlx', 'numpy', 'torch'))])"
        assert run(code).stdout == "[]\n"


def cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)


class TestBackend:
    def test_it_is_one_of_three(self) -> None:
        assert device.backend() in ("metal", "cuda", "cpu")
        assert (device.backend() == "cpu") == cpu()

    def test_it_follows_the_default_device(self) -> None:
        before = mx.default_device()
        try:
            mx.set_default_device(mx.Device(mx.DeviceType.cpu))
            assert device.backend() == "cpu"
        finally:
            mx.set_default_device(before)

    @pytest.mark.parametrize(("metal", "name"), [(True, "metal"), (False, "cuda")])
    def test_a_gpu(self, metal: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        class Gpu:
            type = mx.DeviceType.gpu

        monkeypatch.setattr(mx, "default_device", Gpu)
        monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
        assert device.backend() == name

    def test_the_dtype_to_compute_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for stored in (mx.bfloat16, mx.float16, mx.float32):
            monkeypatch.setattr(device, "backend", lambda: "cpu")
            assert device.compute_dtype(stored) == mx.float32
            monkeypatch.setattr(device, "backend", lambda: "metal")
            assert device.compute_dtype(stored) == stored


class TestMemory:
    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A machine that tells nothing."""
        self.root, self.meminfo = tmp_path / "cgroup", tmp_path / "meminfo"
        self.root.mkdir()
        monkeypatch.setattr(device, "_CGROUP", self.root)
        monkeypatch.setattr(device, "_MEMINFO", self.meminfo)
        monkeypatch.setattr(device, "backend", lambda: "cpu")

    def has(self, available_kb: int) -> None:
        self.meminfo.write_text(
            f"MemTotal:       99999999 kB\nMemFree: 5 kB\nMemAvailable:   {available_kb} kB\nX: 1 kB\n"
        )

    def container(self, limit: int | str, used: int, cached: tuple[int, int] = (0, 0), version: int = 2) -> None:
        v2 = ("memory.max", "memory.current", "memory.stat")
        v1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")
        (self.root / "memory").mkdir(exist_ok=True)
        stat = f"anon 5\ninactive_file {cached[0]}\nactive_file {cached[1]}\nslab 9\n"
        for name, text in zip(v2 if version == 2 else v1, (f"{limit}\n", f"{used}\n", stat), strict=True):
            (self.root / name).write_text(text)

    def test_what_the_machine_has_available(self) -> None:
        self.has(4 << 20)
        assert device.memory() == device.Memory(4 * GIB, "memory available now")

    @pytest.mark.parametrize("version", [1, 2])
    def test_a_containers_limit_when_it_is_lower(self, version: int) -> None:
        self.has(4 << 20)
        self.container(3 * GIB, GIB, version=version)
        assert device.memory() == device.Memory(2 * GIB, "this container's memory limit")
        self.container(9 * GIB, GIB, version=version)
        assert device.memory() == device.Memory(4 * GIB, "memory available now")

    def test_cached_files_are_available(self) -> None:
        self.has(64 << 20)
        self.container(8 * GIB, 7 * GIB, cached=(4 * GIB, 2 * GIB))
        assert device.memory() == device.Memory(7 * GIB, "this container's memory limit")
        self.container(8 * GIB, GIB, cached=(4 * GIB, 0))  # figures read at different moments
        assert device.memory() == device.Memory(8 * GIB, "this container's memory limit")

    def test_a_container_over_its_limit_has_none(self) -> None:
        self.container(GIB, 2 * GIB)
        assert device.memory() == device.Memory(0, "this container's memory limit")

    def test_no_limit(self) -> None:
        self.has(4 << 20)
        self.container("max", GIB)
        assert device.memory() == device.Memory(4 * GIB, "memory available now")
        (self.root / "memory.max").unlink()
        self.container(9223372036854771712, GIB, version=1)
        assert device.memory() == device.Memory(4 * GIB, "memory available now")

    @pytest.mark.parametrize("text", ["", "MemAvailable:\n", "MemAvailable: lots kB\n", "MemTotal: 5 kB\n"])
    def test_what_cannot_be_read_is_passed_over(self, text: str) -> None:
        self.meminfo.write_text(text)
        self.container("?", 1)
        found = device.memory()
        assert found is not None
        assert found.source == "physical memory"
        assert found.available > GIB // 2

    @pytest.mark.parametrize(
        ("info", "expected"),
        [
            ({"max_recommended_working_set_size": 5, "memory_size": 8}, 5),
            ({"memory_size": 8}, 8),
            ({}, None),
        ],
    )
    def test_a_gpus(self, info: dict[str, Any], expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "backend", lambda: "metal")
        monkeypatch.setattr(mx, "device_info", lambda: info)
        found = device.memory()
        assert (found and found.available) == expected


def test_weights_are_kept_resident_on_a_mac_only(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 7})
    for name in ("cpu", "cuda", "metal"):
        monkeypatch.setattr(device, "backend", lambda name=name: name)
        device.keep_resident()
    assert limits == [7]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ImportError("No module named 'mlx'", name="mlx"), True),
        (ImportError("No module named 'mlx.core'", name="mlx.core"), True),
        (ImportError("libmlx.so: cannot open shared object file"), True),
        (ImportError("No module named 'yaml'", name="yaml"), False),
        (ImportError("No module named 'mlx_lm'", name="mlx_lm"), False),
    ],
)
def test_a_missing_backend_is_explained(error: ImportError, expected: bool) -> None:
    line = device.explain_missing_mlx(error)
    assert (line is not None) == expected
    if line:
        assert "openelm-mlx[cpu]" in line
        assert str(error) in line


FAULTS = """
import resource
import sys
import openelm_mlx
import mlx.core as mx
from openelm_mlx import device

if sys.argv[1] == "settled":
    device.settle_for_training()

def work():
    mx.eval(mx.ones(1 << 23) + 1)  # 32 MB, 8,192 pages

for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@LINUX
@pytest.mark.skipif(device.backend() != "cpu", reason="about MLX's memory on a CPU")
def test_memory_of_a_settled_process_is_not_asked_for_again() -> None:
    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("settled") < 1000 < 10_000 < faults("not")


def test_a_gpus_cache_is_limited_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(device, "backend", lambda: "metal")
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 16 * GIB})
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    device.settle_for_training()
    assert limits == [2 * GIB]
