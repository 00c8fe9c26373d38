"""Tables, and the published figures."""

from __future__ import annotations

from openelm_mlx.benchmarks import published
from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.benchmarks.results import ratios
from openelm_mlx.benchmarks.table import aligned, number, ratio_table, table
from tests.benchmarks.made import row


def test_a_whole_table() -> None:
    rows = [
        row(
            prompt_tps=Spread.of([1100.0, 1103.2, 1104.0]),
            generation_tps=Spread.of([28.5, 29.0, 29.25]),
            total_tps=Spread.of([31.0, 31.0, 31.04]),
            weight_bytes=1_086_000_000,
            kv_bytes_per_token=61_440,
            ceiling_tps=38.04,
            share=0.7624,
            dispatches=1210,
            peak_memory_gb=1.2,
        ),
        row(
            0.63,
            peer="mlx-lm",
            variant="float32, OpenBLAS",
            model="OpenELM-3B",
            precision="4bit",
            generation_tps=Spread.of([0.6, 0.63, 0.7]),
            total_tps=Spread.of([0.5]),
        ),
    ]
    assert table(rows) == [
        "model         precision  program                     tokens   prompt tok/s  generation tok/s  total tok/s"
        "  MB/token  KV kB/position  ceiling tok/s  share  dispatches  memory GB",
        "OpenELM-270M  bf16       openelm-mlx                 36+128  1,103.2 ± 2.0        29.0 ± 0.4   31.0 ± 0.0"
        "   1,086.0            61.4           38.0    76%       1,210       1.20",
        "OpenELM-3B    4bit       mlx-lm (float32, OpenBLAS)  36+128           0.63       0.63 ± 0.05         0.50",
    ]


def test_columns_that_are_empty_everywhere_are_left_out() -> None:
    heading, *lines = table([row(), row(dispatches=5)])
    assert "dispatches" in heading
    assert not any(name in heading for name in ("MB/token", "KV", "ceiling", "share", "memory"))
    assert len(lines) == 2
    assert [line.rstrip() for line in lines] == lines


def test_numbers_keep_three_digits() -> None:
    values = {0.625: "0.62", 9.99: "9.99", 9.996: "10.0", 10: "10.0", 212.4: "212.4", 12345.67: "12,345.7"}
    assert {value: number(value) for value in values} == values


def test_alignment() -> None:
    assert aligned([("a", "n", "empty"), ("long name", "1", ""), ("x", "100", "")], left=(0,)) == [
        "a            n",
        "long name    1",
        "x          100",
    ]


def test_names_do_not_steer_the_terminal() -> None:
    assert "\x1b" not in "".join(table([row(model="\x1b[31mred\n")]))


def test_ratios() -> None:
    ours = row(model="OpenELM-3B", generation_tps=Spread.of([30, 60, 40]))
    theirs = row(10.0, model="OpenELM-3B", peer="mlx-lm", generation_tps=Spread.of([10, 10, 5]))
    assert ratio_table(ratios([ours, theirs], "openelm-mlx")) == [
        "model       precision  tokens  program      against             prompt         generation              total",
        "OpenELM-3B  bf16       36+128  openelm-mlx  mlx-lm   10.0x (10.0-10.0)  6.00x (3.00-8.00)  10.0x (10.0-10.0)",
    ]


def test_the_published_figures_and_no_others() -> None:
    told = {(f.model, f.precision, f.machine): f.generation_tps for f in published.PUBLISHED}
    assert told == {
        ("OpenELM-270M", "bf16", "Apple M2 Max"): 212.40,
        ("OpenELM-3B", "bf16", "Apple M2 Max"): 33.96,
        ("OpenELM-270M", "4bit", "Apple M2 Max"): 256.35,
        ("OpenELM-3B", "4bit", "Apple M2 Max"): 60.33,
        ("OpenELM-1_1B", "bf16", "NVIDIA RTX 4090"): 92.15,
        ("OLMo-1B", "bf16", "NVIDIA RTX 4090"): 203.40,
    }
    assert [f.generation_tps for f in published.published("OpenELM-3B", "4bit")] == [60.33]
    assert published.published("OpenELM-450M", "bf16") == ()


def test_their_lines() -> None:
    assert published.lines(published.published("OLMo-1B", "bf16")) == [
        "published (Mehta et al. 2024, OpenELM, arXiv 2404.14619):",
        "model    size   precision  machine          generation tok/s",
        "OLMo-1B  1.18B  bf16       NVIDIA RTX 4090            203.40",
    ]
    assert len(published.lines()) == 2 + 6
    assert published.lines(()) == []
