"""``openelm bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openelm_mlx.benchmarks.choices import (
    PEER_NAMES,
    PROTOCOLS_HELP,
    SUITES,
    THRESHOLD,
    TRAINERS_HELP,
    check_nothing_for_a_verb,
    check_together,
    names,
    plan,
    span,
    trainers,
)
from openelm_mlx.benchmarks.trainers.base import Training
from openelm_mlx.cli.default_model import model_or_demo
from openelm_mlx.convert.choices import PRECISIONS
from openelm_mlx.errors import OpenELMError

if TYPE_CHECKING:
    from openelm_mlx.benchmarks.results import Result

_TRAINING = Training()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[
    str | None,
    typer.Option(
        help="A model folder, a Hugging Face Hub name, or a size such as OpenELM-270M; the embedded demonstration "
        "model by default.",
        show_default=False,
    ),
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Measure the size without its weights: speed depends on shapes alone.")
]
Precision = Annotated[
    str | None, typer.Option(help=f"Of random weights, several with commas: {', '.join(PRECISIONS)}.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: Model = None,
    random_weights: RandomWeights = False,
    precision: Precision = None,
    suite: Annotated[
        str | None,
        typer.Option(help="; ".join(f"{name}: {suite.help}" for name, suite in SUITES.items()) + "."),
    ] = None,
    protocol: Annotated[str | None, typer.Option(help=PROTOCOLS_HELP)] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Length of the prompt; several with commas.")] = None,
    gen_tokens: Annotated[int | None, typer.Option(help="Tokens generated in a run.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Measured runs.")] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which a run stops generating; its speed is that of what it did.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help=f"Programs to measure in turn with this one: {', '.join(PEER_NAMES)}.")
    ] = None,
    corenet: Annotated[Path | None, typer.Option(help="A checkout of Apple's CoreNet.")] = None,
    llama_bench: Annotated[Path | None, typer.Option(help="llama.cpp's program llama-bench.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="The model as a GGUF file, for llama.cpp.")] = None,
    torch_python: Annotated[Path | None, typer.Option(help="A Python that has PyTorch, if this one has not.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speeds and roofline into this PNG file.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Keep the result in this file instead of the data folder.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results instead of the data folder.")] = None,
    save_to: Annotated[
        Path | None, typer.Option(help="Folder to keep results in, named by chip and system; the last one stays.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="An older result: compare, and exit with 1 when something became slower.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Part of a speed that may be lost before --against calls it slower.")
    ] = THRESHOLD,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell what a decode step spends its time on, instead.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure tokens per second as the OpenELM paper does.

    Batch 1, key-value cache on, greedy, end-of-sequence tokens ignored; a warm-up, then several runs: medians and
    spread, beside what the machine's memory bandwidth allows. The result is kept as JSON.
    """
    given = {name for name in context.params if _typed(context, name)}
    if context.invoked_subcommand:
        check_nothing_for_a_verb(given, context.invoked_subcommand)
        return
    if suite is None and not random_weights:
        model = model_or_demo(model, quiet=quiet)
    wanted = plan(
        suite,
        model=model,
        random_weights=random_weights,
        precision=precision,
        compare=compare,
        protocol=protocol,
        prompt_tokens=prompt_tokens,
        gen_tokens=gen_tokens,
        repeats=repeats,
        time_limit=time_limit,
    )
    check_together(given, wanted.peers, threshold)
    from openelm_mlx import plotting
    from openelm_mlx.benchmarks import results
    from openelm_mlx.benchmarks import suite as suites
    from openelm_mlx.benchmarks.peers.base import Paths

    tasks = [
        suites.Task(suites.subject_of(case.model, random_weights=case.random_weights, precision=case.precision), p)
        for case in wanted.cases
        for p in case.protocols
    ]
    if explain:
        _explain([task.subject for task in tasks], json_file)
        return
    old = results.load(against) if against else None
    if plot:
        plotting.require()
    folder = out or results.default_folder()
    for file in filter(None, (json_file, plot)):
        results.check_place(file)
    for place in filter(None, (None if json_file else folder, save_to)):
        results.check_folder(place)
    paths = Paths(corenet=corenet, llama_bench=llama_bench, gguf=gguf, torch_python=torch_python)
    kept: Path | None = None
    result: Result | None = None
    try:
        for result in suites.measure(
            tasks,
            name=wanted.name,
            command=results.shown_command(sys.argv[1:]),
            peers=wanted.peers,
            paths=paths,
            progress=_teller(quiet),
        ):
            file = kept or json_file or results.default_path(result, folder)
            results.save(result, file)
            kept = file
    finally:  # what a long run measured before it was interrupted is told too
        if result is not None and kept is not None:
            _print_result(result, kept)
    assert result is not None
    _store(result, save_to)
    if plot:
        from openelm_mlx.benchmarks.plots import plot as draw

        draw(result, plot)
    if old is not None:
        _hold_against(result, old, threshold)


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _teller(quiet: bool) -> Any:
    def tell(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return tell


def _print_result(result: Result, kept: Path) -> None:
    from openelm_mlx import machine
    from openelm_mlx.benchmarks import published, table

    print(*machine.lines(result.machine), sep="\n")
    if result.bandwidth:
        print(f"reads     {result.bandwidth.bytes_per_s / 1e9:.1f} GB/s ({result.bandwidth.how})")
    print("", *table.table(result.rows), sep="\n")
    if result.ratios:
        print("", "times as fast, run by run:", *table.ratio_table(result.ratios), sep="\n")
    models = {(row.model, row.precision): None for row in result.rows}
    figures = tuple(figure for model, precision in models for figure in published.published(model, precision))
    if figures:
        print("", *published.lines(figures), sep="\n")
    print("", *(f"note: {note}" for note in result.notes), f"kept in {kept}", sep="\n", flush=True)


def _store(result: Result, folder: Path | None) -> None:
    """Keep the result in a folder of such, by chip and system."""
    if folder is None:
        return
    from openelm_mlx.benchmarks import results

    stored = results.default_path(result, folder, dated=False)
    results.save(result, stored)
    print(f"stored in {stored}")


def _hold_against(result: Result, old: Result, threshold: float) -> None:
    from openelm_mlx.benchmarks import comparison

    found = comparison.compare(result, old, threshold)
    print("", *comparison.lines(found), sep="\n")
    if found.slowdowns:
        raise typer.Exit(1)


def _explain(subjects: list[Any], json_file: Path | None) -> None:
    from openelm_mlx.benchmarks import explain
    from openelm_mlx.benchmarks.models import load_subject

    lines, found = [], []
    for subject in dict.fromkeys(subjects):
        explanation = explain.explain(load_subject(subject))
        lines += [f"{subject.name} {subject.precision}", *explain.lines(explanation)]
        found.append({"model": subject.name, "precision": subject.precision, **explanation.to_json()})
    _print(found, lines, json_file)


def _one_subject(model: str | None, random_weights: bool, precision: str | None) -> Any:
    from openelm_mlx.benchmarks.suite import subject_of

    if not random_weights:
        model = model_or_demo(model)
    elif model is None:
        raise OpenELMError("random weights need a size: --model OpenELM-270M")
    elif precision is None:
        precision = "bf16"
    return subject_of(model, random_weights=random_weights, precision=precision)


def _can_be_written(json_file: Path | None) -> None:
    if json_file:
        from openelm_mlx.benchmarks.results import check_place

        check_place(json_file)


def _print(found: Any, lines: list[str], json_file: Path | None) -> None:
    """The figures for people, and `found`, their plain values, in a file."""
    print(*lines, sep="\n", flush=True)
    if json_file:
        from openelm_mlx.benchmarks.results import save_json

        save_json(found, json_file)


@app.command()
def train(
    model: Model = None,
    random_weights: RandomWeights = False,
    precision: Precision = None,
    method: Annotated[
        str, typer.Option(help="full: all weights; lora, dora: adapters on every projection.")
    ] = _TRAINING.method,
    batch_size: Annotated[int, typer.Option(help="Rows a step.")] = _TRAINING.batch_size,
    seq_length: Annotated[int, typer.Option(help="Tokens a row.")] = _TRAINING.seq_length,
    steps: Annotated[int, typer.Option(help="Timed steps, after one that warms up.")] = _TRAINING.steps,
    rank: Annotated[int, typer.Option(help="Of adapters.")] = _TRAINING.rank,
    ragged: Annotated[
        str | None,
        typer.Option(help="Sequences of random lengths, such as 20-256: packed into rows here, padded by mlx-lm."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help=f"Trainers to measure in turn with this one. {TRAINERS_HELP}")
    ] = None,
    json_file: Json = None,
    save_to: Annotated[
        Path | None, typer.Option(help="Folder to keep the result in, named by chip and system; the last one stays.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure fine-tuning: tokens a second of training steps on random data."""
    how = Training(
        method=method, batch_size=batch_size, seq_length=seq_length, steps=steps, rank=rank, ragged=span(ragged)
    )
    with_whom = trainers(compare)
    _can_be_written(json_file)
    from openelm_mlx.benchmarks import results
    from openelm_mlx.benchmarks import train as training

    if save_to:
        results.check_folder(save_to)
    subject = _one_subject(model, random_weights, precision)
    report = training.measure(subject, how, with_whom, progress=_teller(quiet))
    result = report.result(results.shown_command(sys.argv[1:]))
    _print(result.to_json(), training.lines(report), json_file)
    _store(result, save_to)


@app.command()
def norms(
    model: Model = None,
    random_weights: RandomWeights = False,
    precision: Precision = None,
    json_file: Json = None,
) -> None:
    """Measure what RMSNorm costs: as separate operations, and as this program runs it.

    The paper found OpenELM slower than OLMo for its many norms, each several small operations in PyTorch.
    """
    _can_be_written(json_file)
    from openelm_mlx.benchmarks import norms as measuring

    report = measuring.measure(_one_subject(model, random_weights, precision))
    _print(report.to_json(), measuring.lines(report), json_file)


@app.command()
def families(
    only: Annotated[str | None, typer.Option(help="Names of families, with commas; all by default.")] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="A further model for mlx-lm, a folder or Hub name; may be given several times."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help=f"{', '.join(PRECISIONS)}; bf16 by default, fp32 on a CPU.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 36,
    gen_tokens: Annotated[int, typer.Option(help="Tokens generated in a run.")] = 128,
    repeats: Annotated[int, typer.Option(help="Measured runs.")] = 3,
    json_file: Json = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure OpenELM beside the small families it is compared with, all through mlx-lm's model code.

    Random weights in the true shapes; no download.
    """
    _can_be_written(json_file)
    import dataclasses

    from openelm_mlx import device
    from openelm_mlx.benchmarks import families as measuring
    from openelm_mlx.benchmarks.protocol import Protocol

    protocol = Protocol(prompt_tokens=prompt_tokens, gen_tokens=gen_tokens, repeats=repeats)
    chosen = measuring.select(names(only) if only else None)
    tell, found = _teller(quiet), []
    for result in measuring.measure_families(
        protocol,
        precision=precision or ("fp32" if device.backend() == "cpu" else "bf16"),
        chosen=chosen,
        checkpoints=checkpoint or (),
    ):
        tell(f"{result.name} ({result.peer}): {'left out' if result.left_out else 'done'}")
        found.append(result)
    _print([dataclasses.asdict(r) for r in found], measuring.lines(found), json_file)


@app.command()
def start(
    model: Annotated[Path, typer.Option(help="A model folder with a tokenizer.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    repeats: Annotated[int, typer.Option(help="Measured starts of each program.")] = 10,
    json_file: Json = None,
) -> None:
    """Measure cold starts: from the start of a process to its first text, `openelm generate` and `mlx_lm.generate`."""
    _can_be_written(json_file)
    import dataclasses

    from openelm_mlx.benchmarks import startup
    from openelm_mlx.loading import read_model_config

    read_model_config(model)  # refuses what is no model folder before minutes are spent
    programs = startup.generators(model, prompt or startup.PROMPT)
    found = startup.cold_start([*programs, *startup.phases()], repeats)
    _print([dataclasses.asdict(s) for s in found], startup.lines(found), json_file)


@app.command()
def dispatches(
    model: Annotated[str | None, typer.Option(help="One of the sizes, several with commas; all by default.")] = None,
    precision: Annotated[str, typer.Option(help=f"Several with commas: {', '.join(PRECISIONS)}.")] = "bf16,4bit",
    json_file: Json = None,
) -> None:
    """Count the primitives that a decode step dispatches on a GPU, this program's and mlx-lm's.

    Counted from graphs, on any machine; nothing is computed. Small models on a GPU pay for each of them.
    """
    _can_be_written(json_file)
    from importlib.util import find_spec

    from openelm_mlx.benchmarks import dispatches as counting
    from openelm_mlx.config import PRESETS, OpenELMConfig

    sizes = names(model) if model else list(PRESETS)
    found = counting.compare(
        [(size, OpenELMConfig.preset(size)) for size in sizes], names(precision), mlx_lm=find_spec("mlx_lm") is not None
    )
    _print([c.to_json() for c in found], counting.lines(found), json_file)


@app.command()
def estimate(
    model: Annotated[str | None, typer.Option(help="One of the sizes, several with commas; all by default.")] = None,
    json_file: Json = None,
) -> None:
    """Estimate tokens per second on Apple's chips, from bytes and kernels a token; nothing is measured.

    Fitted to the figures that the OpenELM paper reports for an M2 Max.
    """
    _can_be_written(json_file)
    import dataclasses

    from openelm_mlx.benchmarks import estimates
    from openelm_mlx.config import PRESETS

    found = estimates.estimates(names(model) if model else PRESETS, ("bf16", "4bit"))
    _print([dataclasses.asdict(e) for e in found], estimates.lines(found), json_file)
