"""A busy machine is seen, and one's own work is not taken for others'."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openelm_mlx.benchmarks import busy

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat")


class FakeProc:
    """A /proc with two cores whose counts of 100 ticks a second are set by hand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(busy, "_PROC", folder)
        monkeypatch.setattr(os, "sysconf", lambda name: 100)
        monkeypatch.setattr(os, "getpid", lambda: 10)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setattr(busy, "SAMPLE_S", 0.0)
        self.cores((0, 0), (0, 0))
        self.process(10, 1, 0)

    def cores(self, *used: tuple[int, int]) -> None:
        """User ticks and stolen ticks of every core."""
        lines = [f"cpu{i} {user} 0 0 5000 700 0 0 {stolen} 99 99" for i, (user, stolen) in enumerate(used)]
        (self.folder / "stat").write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 1 1", *lines, "intr 5"]) + "\n")

    def process(self, pid: int, parent: int, ticks: int, of_children: int = 0, name: str = "python") -> None:
        """A process, its user ticks, and the system ticks of children that have ended."""
        (self.folder / str(pid)).mkdir(exist_ok=True)
        fields = f"R {parent} 1 1 0 -1 4194304 9 9 9 9 {ticks} 0 0 {of_children} 20 0 1"
        (self.folder / str(pid) / "stat").write_text(f"{pid} ({name}) {fields}\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    return FakeProc(tmp_path, monkeypatch)


def after_one_second(before: busy.Usage | None, monkeypatch: pytest.MonkeyPatch) -> str | None:
    assert before is not None
    monkeypatch.setattr(time, "monotonic", lambda: before.at + 1)
    return busy.busy_since(before)


@linux
def test_others_are_counted(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    before = busy.usage()
    proc.cores((100, 0), (80, 0))  # 1.8 s in one second
    proc.process(10, 1, 40)  # 0.4 of them ours
    proc.process(99, 1, 500)
    assert after_one_second(before, monkeypatch) == (
        "the machine is busy: other processes use 1.4 of 2 cores; figures will be low and uneven"
    )


@linux
def test_ones_own_processes_are_not_others(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    before = busy.usage()
    proc.cores((100, 0), (90, 0))
    proc.process(10, 1, 10, of_children=60)  # a worker that has ended
    proc.process(11, 10, 50)
    proc.process(12, 11, 60, name="a) R 1 (b")  # a name that looks like fields
    assert after_one_second(before, monkeypatch) is None  # 1.9 - 1.8 of 2 cores: the usual background


@linux
def test_what_the_host_takes(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    before = busy.usage()
    proc.cores((0, 50), (0, 70))
    line = after_one_second(before, monkeypatch)
    assert line and "other processes and other virtual machines use 1.2 of 2 cores" in line


@linux
def test_only_the_cores_this_process_may_use(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    before = busy.usage()
    proc.cores((100, 0), (5, 0))
    assert after_one_second(before, monkeypatch) is None


@linux
def test_the_real_thing() -> None:
    """A child that computes counts as ours while it runs, and after it was waited for."""
    before = busy.usage()
    code = "import time\nwhile time.process_time() < 0.3: pass\ninput()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        while (now := busy.usage()) and before and now.own_s - before.own_s < 0.25:
            time.sleep(0.02)
    finally:
        child.communicate(b"\n")
    after = busy.usage()
    assert before and now and after
    assert after.own_s >= now.own_s
    assert after.all_s - before.all_s >= 0.2


@linux
def test_no_such_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the load average decides."""
    monkeypatch.setattr(busy, "_PROC", tmp_path / "none")
    monkeypatch.setattr(busy, "cores", lambda: 4)
    assert busy.usage() is None
    assert busy.busy_since(None) is None
    monkeypatch.setattr(busy, "load_average", lambda: [1.9, 9.0, 9.0])
    assert busy.busy() is None
    monkeypatch.setattr(busy, "load_average", lambda: [2.0, 0.0, 0.0])
    assert busy.busy() == "the machine is busy: its load is 2.0 on 4 cores; figures will be low and uneven"
    monkeypatch.setattr(busy, "load_average", lambda: None)
    assert busy.busy() is None


def test_elsewhere_the_load_average_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(busy, "load_average", lambda: [1000.0, 0.0, 0.0])
    assert busy.usage() is None
    line = busy.busy()
    assert line and "its load is 1000.0 on " in line
