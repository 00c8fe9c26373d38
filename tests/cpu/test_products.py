"""blas.c against NumPy: every layout and size, several threads, and what forks, signals and time do to it."""

from __future__ import annotations

import ctypes
import platform
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product as combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openelm_mlx.cpu import blas
from tests.cpu.compiled import COLUMN_MAJOR, GEMM64, NEEDED, ROW_MAJOR, START, Library, Product, apart, check

pytestmark = NEEDED

WithThreads = Callable[[int], Library]

MOST_ROWS = int(re.findall(r"MOST_ROWS = (\d+)", blas._SOURCE.read_text())[0])
"""Products of more rows are OpenBLAS's."""

ROWS = sorted({*range(1, 14), MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, MOST_ROWS + 7})
SMALL = 1 << 16
"""Weights below which a product is not shared among threads; with plain B of four times as many it is OpenBLAS's."""

SIZES = [
    (1, 1), (3, 5), (7, 1), (1, 7), (4, 8), (5, 16), (6, 31), (4, 32), (129, 67), (66, 130),
    (255, 257), (256, 256), (257, 255), (1, SMALL - 1), (1, SMALL), (SMALL, 1), (SMALL + 3, 1), (2100, 33),
    (511, 513), (512, 512), (513, 512), (1, 4 * SMALL), (4 * SMALL + 1, 1),
    (1003, 1021),
]  # fmt: skip
"""`n` and `k`: on both sides of where the way to compute changes, and large enough for many pieces."""


def has_avx2() -> bool:
    return platform.machine() == "x86_64" and " avx2 " in Path("/proc/cpuinfo").read_text()


def every_size(library: Library, rows: Sequence[int]) -> None:
    for n, k in SIZES:
        largest = Product.of_integers(rows[-1], n, k)
        expected = largest.expected()
        for m, transposed in combinations(rows, (True, False)):
            if n * k <= SMALL or m in (1, 4, 7, MOST_ROWS):
                some = replace(largest, a=largest.a[:m], c=largest.c[:m], transposed_b=transposed)
                check(library, some, expected[:m])


class TestLayouts:
    @pytest.mark.parametrize("threads", [1, 2, 4])
    def test_rows_and_sizes(self, library_with: WithThreads, threads: int) -> None:
        every_size(library_with(threads), ROWS if threads == 2 else (1, 4, 7, MOST_ROWS))

    @pytest.mark.skipif(not has_avx2(), reason="needs an x86 processor with AVX2")
    @pytest.mark.parametrize("kind", ["x86-64", "haswell"])
    def test_other_processors_vectors(self, library_file: Path, kind: str) -> None:
        made = library_file.with_name(f"{kind}.so")
        flags = [x for x in blas._FLAGS if not x.startswith("-march")]
        subprocess.run(["cc", *flags, f"-march={kind}", str(blas._SOURCE), "-o", str(made)], check=True)
        every_size(Library(made, 2), (1, 2, 3, 5, 8, 13))

    @pytest.mark.parametrize("order", [ROW_MAJOR, COLUMN_MAJOR])
    @pytest.mark.parametrize(("a", "b"), [(False, True), (False, False), (True, True), (True, False)])
    def test_orders_transpositions_and_gaps(self, library_with: WithThreads, order: int, a: bool, b: bool) -> None:
        sizes = ((3, 5), (70, 1000), (300, 301))
        for m, (n, k), gap in combinations((1, 2, 5, 8, 9, MOST_ROWS, MOST_ROWS + 1), sizes, (0, 1, 7)):
            how = {"order": order, "transposed_a": a, "transposed_b": b, "gap": gap}
            check(library_with(2), Product.of_integers(m, n, k, **how))

    @pytest.mark.parametrize("transposed", [True, False])
    def test_where_arrays_begin(self, library_with: WithThreads, transposed: bool) -> None:
        """At any place in a line of the cache, with rows that all begin at the same one or at any."""
        for past, gap, k, m in combinations(range(17), (0, 8, 13), (35, 48, 200), (1, 7)):
            check(library_with(1), Product.of_integers(m, 21, k, gap=gap, past=past, transposed_b=transposed))
        for past in range(0, 16, 3):
            check(library_with(4), Product.of_integers(7, 800, 320, past=past, transposed_b=transposed))

    @pytest.mark.parametrize("transposed", [True, False])
    @pytest.mark.parametrize("alpha", [1, 0, -0.5, 2])
    @pytest.mark.parametrize("beta", [0, 1, -0.5, 3])
    def test_alpha_and_beta(self, library_with: WithThreads, alpha: float, beta: float, transposed: bool) -> None:
        how = {"alpha": alpha, "beta": beta, "transposed_b": transposed, "gap": 2}
        for m, (n, k) in combinations((1, 3, 6, 8, MOST_ROWS + 2), ((3, 5), (70, 1001))):
            check(library_with(2), Product.of_integers(m, n, k, **how))

    def test_nothing_to_sum_up_and_nothing_to_fill(self, library_with: WithThreads) -> None:
        for m in (1, 8, MOST_ROWS + 1):
            check(library_with(2), Product.of_integers(m, 5, 0, beta=2))
            check(library_with(2), Product.of_integers(m, 0, 4))
        check(library_with(2), Product.of_integers(0, 3, 4))


class TestNumbers:
    @pytest.mark.parametrize("transposed", [True, False])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_no_number_goes_through(self, library_with: WithThreads, value: float, transposed: bool) -> None:
        places = (0, 3, 0.4, -17, -1)  # in `k`, by number or as a share
        for m, (n, k), where, past in combinations((1, 2, 7, 12), ((6, 19), (30, 96), (300, 301)), places, (0, 4)):
            at = int(where * k) if isinstance(where, float) else where
            some = Product.of_integers(m, n, k, transposed_b=transposed, past=past)
            some.a[:, at], some.b[at, :] = 1, 1
            some.a[m // 2, at - 1 if at else 1] = value
            some.b[at, n - 2] = -value
            with np.errstate(all="ignore"):
                expected = some.expected()
            assert 0 < np.isfinite(expected).sum() < expected.size or m == 1
            assert np.array_equal(some.through(library_with(2)), expected, equal_nan=True), f"{some} at {at}"

    def test_overflow_is_infinity(self, library_with: WithThreads) -> None:
        for m, k in combinations((1, 4, 8), (7, 70)):
            some = Product.of_integers(m, 5, k)
            some.a[:], some.b[:] = 3e38, 2
            assert np.array_equal(some.through(library_with(2)), np.full((m, 5), np.inf, np.float32))

    @pytest.mark.parametrize("transposed", [True, False])
    def test_error(self, library_with: WithThreads, transposed: bool) -> None:
        """Of the order of one rounding, relative to the sizes of what is added."""
        rng = np.random.default_rng(0)
        for m, (n, k) in combinations((1, 3, 8, 30), ((50, 1000), (700, 300))):
            a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((m, k), (k, n)))
            some = Product(a, b, np.zeros((m, n), np.float32), transposed_b=transposed)
            size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
            assert (np.abs(some.through(library_with(2)) - some.expected()) / size).max() < 1e-6


class TestThreads:
    def test_the_same_bits_whoever_computes(self, library_with: WithThreads) -> None:
        rng = np.random.default_rng(1)
        for m in (1, 2, 5, 8, 30):
            a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((m, 700), (700, 901)))
            run = Product(a, b, np.zeros((m, 901), np.float32)).laid_out()
            first = run(library_with(1))
            for threads in (1, 2, 4):
                for _ in range(10):
                    assert np.array_equal(run(library_with(threads)), first)

    @pytest.mark.parametrize("how", [{}, {"gap": 16}, {"gap": 12}, {"gap": 3}])
    def test_the_same_bits_wherever_the_weights_lie(self, library_with: WithThreads, how: dict[str, Any]) -> None:
        """What malloc returns differs from run to run."""
        rng = np.random.default_rng(2)
        for m, (n, k) in combinations((1, 4, 9), ((30, 64), (21, 100), (300, 333))):
            a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((m, k), (k, n)))
            some = Product(a, b, np.zeros((m, n), np.float32), **how)
            first = some.through(library_with(2))
            for past in range(1, 16):
                assert np.array_equal(replace(some, past=past).through(library_with(2)), first), past

    @pytest.mark.parametrize("threads", [2, 4])
    def test_callers_at_once(self, library_with: WithThreads, threads: int) -> None:
        """ctypes lets go of the interpreter's lock: one call has the helpers, the others go without."""
        products = [Product.of_integers(m, n, k) for m, (n, k) in combinations((1, 4, 9), ((40, 50), (300, 400)))]
        expected = [p.expected() for p in products]

        def work(seed: int) -> None:
            order = random.Random(seed)
            for _ in range(100):
                n = order.randrange(len(products))
                check(library_with(threads), products[n], expected[n])

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))

    @pytest.mark.parametrize("threads", [2, 4])
    def test_thousands_of_calls(self, library_with: WithThreads, threads: int) -> None:
        """One right after the other, while the helpers still look for work, and after they went to sleep."""
        order = random.Random(0)
        sizes = [(order.randint(1, 9), order.randint(1, 90), order.randint(1, 90)) for _ in range(20)]
        sizes += [(order.randint(1, 12), order.randint(200, 500), order.randint(400, 700)) for _ in range(20)]
        runs = [(p.expected(), p.laid_out()) for p in (Product.of_integers(*size) for size in sizes)]
        for call in range(3000):
            expected, run = runs[order.randrange(len(runs))]
            assert np.array_equal(run(library_with(threads)), expected)
            if call % 100 == 0:
                time.sleep(order.choice((0.0005, 0.001, 0.005)))


def bfloat16(x: Any) -> Any:
    """As words of 16 bits, the upper halves of floats; `x` must fit."""
    words = np.ascontiguousarray(x, np.float32).view(np.uint32)
    assert not (words & 0xFFFF).any()
    return (words >> 16).astype(np.uint16)


class TestBfloat16:
    """Through `cblas_sgemm` too, under the name of floats; see blas.c for what stands where."""

    @staticmethod
    def through(library: Library, a: Any, b: Any, past: int = 0) -> Any:
        """``a (m, width) @ b (n, width).T``, with `b` lying `2 past` words past a multiple of 64 bytes."""
        (m, width), n = a.shape, len(b)
        twice = np.concatenate([a, np.full_like(a, np.nan)])
        room = np.full(n * width // 2 + 64, np.nan, np.float32)
        first = -room.ctypes.data // 4 % 16 + 16 + past
        room[first : first + n * width // 2].view(np.uint16)[:] = bfloat16(b).ravel()
        c = np.full((m, n), np.nan, np.float32)
        library.sgemm(
            ROW_MAJOR, 111, 112, 2 * m, n // 2, width, library.bfloat16_alpha, twice.ctypes.data, width,
            room[first:].ctypes.data, width, 0, c.ctypes.data, n // 2,
        )  # fmt: skip
        return c

    @pytest.mark.parametrize("threads", [1, 2, 4])
    def test_rows_and_sizes(self, library_with: WithThreads, threads: int) -> None:
        for n, width in ((2, 2), (4, 5), (8, 30), (4, 32), (34, 63), (40, 64), (300, 258), (502, 333), (70, 4000)):
            some = Product.of_integers(MOST_ROWS + 60, n, width)
            expected = some.expected()
            for m in (1, 2, 5, 8, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, MOST_ROWS + 60):
                found = self.through(library_with(threads), some.a[:m], some.b.T, past=m % 16)
                assert np.array_equal(found, expected[:m]), (m, n, width)

    def test_wherever_the_weights_lie(self, library_with: WithThreads) -> None:
        rng = np.random.default_rng(3)
        b = np.ldexp(rng.integers(-128, 128, (40, 96)), rng.integers(-9, 9, (40, 96))).astype(np.float32)
        for m in (1, 7):
            a = rng.normal(size=(m, 96)).astype(np.float32)
            first = self.through(library_with(2), a, b)
            size = np.abs(a).astype(np.float64) @ np.abs(b.T)
            assert (np.abs(first - a.astype(np.float64) @ b.T) / size).max() < 1e-6
            for past in range(1, 16):
                assert np.array_equal(self.through(library_with(2), a, b, past), first), past

    @pytest.mark.parametrize("at", [0, 1, 17, 40, -16, -1])
    def test_what_is_no_number_goes_through(self, library_with: WithThreads, at: int) -> None:
        for m, width, past in combinations((1, 7, MOST_ROWS + 1), (64, 98, 300), (0, 3)):
            some = Product.of_integers(m, 6, width)
            some.a[:, at], some.b[at] = 1, (1, np.inf, -np.inf, np.nan, 2, 3)
            with np.errstate(all="ignore"):
                expected = some.expected()
            found = self.through(library_with(2), some.a, some.b.T, past)
            assert np.array_equal(found, expected, equal_nan=True)


class TestWho:
    """Which products go to OpenBLAS: a stand-in there notes them."""

    @pytest.fixture
    def noted(self, library_file: Path, tmp_path: Path) -> tuple[Library, list[tuple[Any, ...]]]:
        calls: list[tuple[Any, ...]] = []
        own = Path(shutil.copy(library_file, tmp_path / "blas.so"))
        return Library(own, 2, GEMM64(lambda *arguments: calls.append(arguments))), calls

    @pytest.mark.parametrize(
        ("m", "n", "k", "how", "ours"),
        [
            (1, 300, 300, {}, True),
            (8, 300, 300, {}, True),
            (MOST_ROWS, 300, 300, {}, True),
            (MOST_ROWS + 1, 300, 300, {}, False),
            (1, 300, 300, {"transposed_a": True}, False),
            (1, 300, 300, {"order": COLUMN_MAJOR}, False),
            (1, 2000, 2000, {}, True),
            (8, 511, 513, {"transposed_b": False}, True),
            (8, 512, 512, {"transposed_b": False}, False),
            (9, 3, 3, {"transposed_b": False}, False),
        ],
    )
    def test_few_rows_are_ours(
        self, noted: tuple[Library, list[Any]], m: int, n: int, k: int, how: dict[str, Any], ours: bool
    ) -> None:
        Product.of_integers(m, n, k, **how).through(noted[0])
        assert (not noted[1]) == ours

    def test_everything_is_handed_on(self, noted: tuple[Library, list[Any]]) -> None:
        address = ctypes.addressof(ctypes.c_char())
        numbers = (102, 112, 111, 10, 11, 12, 0.5, address, 13, address + 8, 14, 0.25, address + 16, 15)
        noted[0].sgemm(*numbers)
        assert noted[1] == [numbers]


HELPERS = """
before = threads()
right(small)
print(len(threads() - before))
right(large)
right(large)
helpers = threads() - before
print(len(helpers))
for helper in helpers:
    status = Path(f"/proc/self/task/{helper}/status").read_text()
    (blocked,) = (int(x.split()[1], 16) for x in status.splitlines() if x.startswith("SigBlk"))
    print(bool(blocked >> 1 & 1), bool(blocked >> 13 & 1))  # SIGINT, SIGALRM
def sleeps():
    time.sleep(0.1)
    lines = [x for h in sorted(helpers) for x in Path(f"/proc/self/task/{h}/status").read_text().splitlines()]
    return [int(x.split()[1]) for x in lines if x.startswith("voluntary_ctxt_switches")]
before = sleeps()
right(large)
print(*(b > a for a, b in zip(before, sleeps())))  # woken, and asleep again
"""

FORK = """
right(large)
stop = threading.Event()
def busy():
    while not stop.is_set():
        right(larger)
        right(blocks)
other = threading.Thread(target=busy)
other.start()
for n in range(8):
    time.sleep(0.003 * n)  # in the middle of a product, or between two
    child = os.fork()
    if child == 0:
        alone = len(threads()) == 1
        for product in (small, large, larger, blocks, small, large) * 3:
            right(product)
        if not alone or len(threads()) != 4:
            os._exit(3)
        if n % 2:
            os._exit(0)
        sys.exit(0)
    print(os.waitpid(child, 0)[1])
    right(large)
stop.set()
other.join()
right(larger)
right(blocks)
"""

GUARDED = """
page = mmap.PAGESIZE
def guarded(values, at_end):
    \"\"\"The values between two pages that nobody may touch, right behind the first or before the second.\"\"\"
    size = -(-values.nbytes // page) * page
    region = mmap.mmap(-1, size + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    for forbidden in (start, start + page + size):
        assert libc.mprotect(ctypes.c_void_p(forbidden), page, 0) == 0
    offset = page + (size - values.nbytes if at_end else 0)
    inside = np.frombuffer(region, np.float32, values.size, offset).reshape(values.shape)
    inside[:] = values
    return inside
for m in (1, 3, 7, 64):
    for n, k in ((1, 1), (5, 17), (33, 200), (64, 48), (500, 333)):
        for at_end in (False, True):
            for transposed in (111, 112):
                p = Product.of_integers(m, n, k)
                a, b, c = (guarded(np.ascontiguousarray(x), at_end) for x in (
                    p.a, p.b.T if transposed == 112 else p.b, p.c))
                library.sgemm(101, 111, transposed, m, n, k, 1, a.ctypes.data, k, b.ctypes.data, b.shape[1], 0,
                              c.ctypes.data, n)
                assert np.array_equal(c, p.expected()), str(p)
            p = Product.of_integers(m, 2 * n, k)  # and in bfloat16
            words = (np.ascontiguousarray(p.b.T).view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.float32)
            a, b, c = (guarded(x, at_end) for x in (np.tile(p.a, (2, 1)), words, p.c))
            library.sgemm(101, 111, 112, 2 * m, n, k, library.bfloat16_alpha, a.ctypes.data, k, b.ctypes.data, k, 0,
                          c.ctypes.data, n)
            assert np.array_equal(c, p.expected()), str(p)
print("done")
"""

ENDING_THREADS = f"""
some = Product.of_integers({MOST_ROWS}, 3, {(1 << 18) // MOST_ROWS})  # a megabyte has to be copied
run = some.laid_out()
def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE >> 20
run(library)
before = held()
for _ in range(100):
    thread = threading.Thread(target=run, args=(library,))
    thread.start()
    thread.join()
print(held() - before < 30)
"""


def test_helpers_are_started_when_first_needed_and_take_no_signals(library_file: Path) -> None:
    assert apart(START + HELPERS, library_file) == ["0", "3", *["True"] * 9]


def test_a_forked_child_starts_its_own(library_file: Path) -> None:
    """Whatever the parent's threads were doing: the child has none of them."""
    assert apart(START + FORK, library_file) == ["0"] * 8


def test_nothing_is_touched_beyond_the_arrays(library_file: Path) -> None:
    assert apart(START + GUARDED, library_file) == ["done"]


def test_a_thread_that_ends_gives_its_memory_back(library_file: Path) -> None:
    assert apart(START + ENDING_THREADS, library_file) == ["True"]
