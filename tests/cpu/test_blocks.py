"""Products that OpenBLAS computes, cut into blocks: their results, and what NumPy's own products see of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product as combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpu.compiled import COLUMN_MAJOR, GEMM64, NEEDED, ROW_MAJOR, START, Library, Product, apart, check

pytestmark = NEEDED

WithThreads = Callable[[int], Library]

SHAPES = [
    (49, 300, 300), (64, 577, 255), (513, 129, 31), (50, 1601, 130), (1601, 50, 130), (17, 257, 1023), (100, 100, 4001),
    (1000, 1000, 7), (1025, 48, 97), (9, 4097, 65), (65, 15, 3000), (1, 700, 1500),
]  # fmt: skip
"""`m`, `n` and `k` of products that are shared: cut by rows, by columns, by both, with and without something left."""

TRAINED = [(512, 1536, 576), (2048, 1536, 200), (1536, 576, 1024), (1024, 576, 8), (8, 576, 1024)]


class TestBlocks:
    @pytest.mark.parametrize("threads", [1, 2, 3, 16])
    def test_make_up_the_product(self, library_with: WithThreads, threads: int) -> None:
        """Each once: what is added to C twice is seen."""
        for number, (m, n, k) in enumerate(SHAPES):
            ta, tb, column_major = number % 2 == 1 or m == 1, number // 2 % 2 == 1, number // 4 % 2 == 1
            order = COLUMN_MAJOR if column_major else ROW_MAJOR
            how = {"transposed_a": ta, "transposed_b": tb, "order": order, "gap": number % 3}
            check(library_with(threads), Product.of_integers(m, n, k, alpha=2, beta=-3, **how))

    @pytest.mark.parametrize("order", [ROW_MAJOR, COLUMN_MAJOR])
    @pytest.mark.parametrize(("a", "b"), [(False, True), (False, False), (True, True), (True, False)])
    def test_in_every_layout(self, library_with: WithThreads, order: int, a: bool, b: bool) -> None:
        how = {"order": order, "transposed_a": a, "transposed_b": b, "gap": 5}
        for m, n, k in ((130, 300, 70), (70, 131, 301)):
            check(library_with(4), Product.of_integers(m, n, k, **how))

    @pytest.mark.parametrize(("m", "n", "k"), TRAINED)
    def test_are_as_exact_as_openblas(self, library_with: WithThreads, m: int, n: int, k: int) -> None:
        rng = np.random.default_rng(4)
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((m, k), (k, n)))
        found = Product(a, b, np.zeros((m, n), np.float32), transposed_a=True).through(library_with(2))
        size = np.abs(a) @ np.abs(b)
        assert (np.abs(found - a @ b) / size).max() < 1e-6

    def test_are_few(self, library_file: Path, tmp_path: Path) -> None:
        """One for each thread, and two of a long product; where there is one thread, nothing is cut."""
        for threads, (m, n, k), expected in (
            (1, (2048, 1536, 576), 1),
            (2, (100, 50, 50), 1),
            (2, (64, 1536, 576), 2),
            (2, (2048, 1536, 576), 4),
            (6, (64, 1536, 576), 6),
        ):
            calls: list[tuple[Any, ...]] = []
            own = Path(shutil.copy(library_file, tmp_path / f"{threads} {m}.so"))
            library = Library(own, threads, GEMM64(lambda *numbers, to=calls: to.append(numbers)))
            a, b, c = (np.zeros(shape, np.float32) for shape in ((m, k), (k, n), (m, n)))
            Product(a, b, c).through(library)
            assert len(calls) == expected, (threads, m, n, k)
            assert sum(rows * columns for _, _, _, rows, columns, *_ in calls) == m * n


class TestBits:
    def test_are_the_same_whoever_computes(self, library_with: WithThreads) -> None:
        """One call has the helpers, the others compute their blocks alone."""
        rng = np.random.default_rng(5)
        runs = []
        for (m, n, k), transposed in combinations([(49, 300, 300), (90, 70, 601), (300, 601, 33)], (True, False)):
            a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((m, k), (k, n)))
            runs.append(Product(a, b, np.zeros((m, n), np.float32), transposed_b=transposed))
        first = [some.through(library_with(4)) for some in runs]

        def work(_: int) -> None:
            for some, expected in zip(runs * 5, first * 5, strict=True):
                assert np.array_equal(some.through(library_with(4)), expected)

        work(0)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))


THREE = (
    START
    + """
openblas().scipy_openblas_set_num_threads64_(3)  # more than a small machine would have
"""
)

ALONE = """
def switches(threads):
    lines = [x for t in sorted(threads) for x in Path(f"/proc/self/task/{t}/status").read_text().splitlines()]
    return [int(x.split()[1]) for x in lines if "ctxt_switches" in x]
own = threads() - {str(threading.get_native_id())}
print(len(own), openblas_threads())
for _ in range(100):  # they look for work for a while
    before = switches(own)
    time.sleep(0.1)
    if switches(own) == before:
        break
for _ in range(20):
    right(blocks)
callers = [threading.Thread(target=lambda: [right(blocks) for _ in range(20)]) for _ in range(3)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(switches(own) == before, openblas_threads())
"""

SETTING = """
seen = []
def gemm(*numbers):
    seen.append(openblas_threads())
    if change:
        openblas().scipy_openblas_set_num_threads64_(change)
noting = Library(Path(sys.argv[1]), 2, GEMM64(gemm))
products = blocks.laid_out(), Product.of_integers(60, 20, 30).laid_out()
change = 0
for product in products:
    product(noting)
print(*sorted(set(seen)), openblas_threads())
change = 2
products[1](noting)
print(openblas_threads())
"""

FORK = """
stop = threading.Event()
def busy():
    while not stop.is_set():
        right(blocks)
other = threading.Thread(target=busy)
other.start()
for n in range(5):
    time.sleep(0.003 * n)
    child = os.fork()
    if child == 0:
        found = openblas_threads()
        right(blocks)
        os._exit(10 * found + openblas_threads())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
other.join()
print(openblas_threads())
"""


def test_openblass_threads_sleep_on(library_file: Path) -> None:
    assert apart(THREE + ALONE, library_file) == ["2", "3", "True", "3"]


def test_its_number_of_threads_is_one_meanwhile_and_then_what_it_was(library_file: Path) -> None:
    """Or what somebody made it meanwhile."""
    assert apart(THREE + SETTING, library_file) == ["1", "3", "2"]


def test_a_fork_finds_it_as_it_was(library_file: Path) -> None:
    assert apart(THREE + FORK, library_file) == ["33"] * 5 + ["3"]
