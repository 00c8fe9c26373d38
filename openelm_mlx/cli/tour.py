"""The tour that ``openelm demo`` gives: the other verbs, run one after another with the embedded model."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openelm_mlx import assets, device, machine
from openelm_mlx.cli.child import Ending, run_verb
from openelm_mlx.cli.stage import Stage
from openelm_mlx.cli.wrapped import Wrapped
from openelm_mlx.errors import OpenELMError
from openelm_mlx.summary import Summary, summarize

CHECKPOINT, DATA, ADAPTER, SPEEDS = "checkpoint", "pie", "tuned", "speeds.json"
"""What is in the tour's folder, beside a model folder for each of `PRECISIONS`."""

PRECISIONS = ("bf16", "4bit")

PROMPT = "We have made great progress"
SAMPLING = ("--temp", "0.6", "--seed", "3", "-q")

OPENINGS = ("The condition of the Navy", "I am glad to say")
"""None of the sentences to learn from begins so."""

TRAINING = ("--epochs", "8", "--batch-size", "8", "--learning-rate", "3e-3")

PATIENCE = 90.0
"""Seconds for the training, a quarter of which are enough on two free cores; it is stopped and used as it is then."""

NEXT = (
    ("Apple's weights, from the Hugging Face Hub", "openelm convert apple/OpenELM-270M-Instruct --out openelm-270m"),
    ("their text", 'openelm generate --model openelm-270m --prompt "Once upon a time" --max-tokens 100'),
    ("tuned on your own sentences", "openelm finetune --model openelm-270m --data my.jsonl --out run1"),
    (
        "how fast the largest size would be here, without its weights",
        "openelm bench --model OpenELM-3B --random-weights",
    ),
)


_NEAR = 0.5
"""Part of the ceiling from which on memory is called the limit."""

_HEARD = 1 << 12
"""Characters kept of a verb's output, for the message when it fails."""


class Tour:
    """One tour through a folder that is there and empty."""

    def __init__(self, stage: Stage, folder: Path, *, kept: bool) -> None:
        self.stage, self.folder, self.kept = stage, folder, kept
        self.model = summarize(assets.demo_model())

    def go(self) -> None:
        """The whole tour.

        Raises:
            OpenELMError: a verb failed.
        """
        start = time.monotonic()
        self._welcome()
        _copy(assets.demo_model(), self.folder / CHECKPOINT)
        _copy(assets.SENTENCES, self.folder / DATA)
        for number, step in enumerate((self._convert, self._generate, self._tune, self._measure), start=1):
            step(number)
        self._farewell(time.monotonic() - start)

    def _welcome(self) -> None:
        facts = dict(line.split(maxsplit=1) for line in machine.lines(machine.machine()))
        self.stage.frame(
            "openelm demo",
            f"What this program does, shown with {assets.ABOUT}. Every command below is really run, on this machine "
            "and without network.",
            {"model": _described(self.model), **{name: facts[name] for name in ("machine", "backend")}},
        )

    def _convert(self, number: int) -> None:
        self.stage.step(number, "Convert")
        self.stage.say(
            "The model comes as Apple's do, as a PyTorch checkpoint. Converted to bf16 every weight stays what it is; "
            "in 4 bits it takes a third of the space. --verify runs a page of text through source and result."
        )
        for precision in PRECISIONS:
            self._verb("convert", CHECKPOINT, "--out", precision, "--precision", precision, "--verify")
        self.stage.say("(The page is a story of today, hence the perplexity: this model has read presidents only.)")

    def _generate(self, number: int) -> None:
        self.stage.step(number, "Generate")
        self.stage.say("The same prompt for both. So small a model knows the tone, and little of what it says.")
        for precision in PRECISIONS:
            self._continue(PROMPT, "--model", precision, "--max-tokens", "80", *SAMPLING)

    def _tune(self, number: int) -> None:
        self.stage.step(number, "Fine-tune")
        lines = (self.folder / DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()
        self.stage.say(f"{len(lines)} sentences to learn from, which begin as an address does and end in pie:")
        self.stage.quote(lines[:2])
        self.stage.say("Two openings that are none of theirs, before:")
        self._openings()
        ending = self._verb(
            "finetune", "--model", PRECISIONS[0], "--data", DATA, "--out", ADAPTER, *TRAINING, limit=PATIENCE
        )
        if ending.stopped:
            self.stage.say(
                f"(Stopped after {PATIENCE:.0f} seconds, because this machine is slow or busy: what was learned so far "
                f"is used{_blas()}.)"
            )
        self.stage.say(f"And after, with the adapter ({_megabytes(self.folder / ADAPTER / 'adapters.safetensors')}):")
        self._openings("--adapter", ADAPTER)

    def _openings(self, *options: str) -> None:
        for opening in OPENINGS:
            self._continue(opening, "--model", PRECISIONS[0], *options, "--max-tokens", "40", *SAMPLING)

    def _measure(self, number: int) -> None:
        self.stage.step(number, "Measure")
        self.stage.say(
            "Every token takes reading all of a model's weights once, so the speed at which this machine reads memory "
            "sets a ceiling."
        )
        arguments = ("bench", "--model", ",".join(PRECISIONS), "--protocol", "quick", "--json", SPEEDS, "--quiet")
        self.stage.command(arguments)
        with self.stage.waiting("measuring, which takes some 20 seconds"):
            self._run(arguments, lambda piece: None)
        result = json.loads((self.folder / SPEEDS).read_text(encoding="utf-8"))
        headings = ("model", "MB/token", "tokens/s", "ceiling", "reached")
        self.stage.table(headings, [_speed(row) for row in result["rows"]])
        self.stage.say(_verdict(result["rows"]))
        for note in result["notes"]:
            self.stage.say(f"Note: {note}.")

    def _farewell(self, seconds: float) -> None:
        self.stage.step(5, "What next")
        self.stage.commands([*_activation(), *NEXT])
        where = (
            f"everything is in {self.folder}, where the commands of its steps work again"
            if self.kept
            else "nothing is left of it; openelm demo --keep FOLDER keeps the models, the adapter and the figures"
        )
        self.stage.say(f"The tour took {seconds:.0f} seconds, and {where}.")

    def _continue(self, prompt: str, *options: str) -> None:
        """Generate, and show the prompt with what follows it."""
        arguments = ("generate", "--prompt", prompt, *options)
        with self._shown(arguments) as output:
            output.add(prompt)
            self._run(arguments, output.add)

    def _verb(self, *arguments: str, limit: float | None = None) -> Ending:
        """Run a verb and show its output."""
        with self._shown(arguments) as output:
            return self._run(arguments, output.add, limit)

    @contextmanager
    def _shown(self, arguments: Sequence[str]) -> Iterator[Wrapped]:
        self.stage.command(arguments)
        with self.stage.output() as output:
            yield output

    def _run(self, arguments: Sequence[str], show: Callable[[str], None], limit: float | None = None) -> Ending:
        said = ""

        def hear(piece: str) -> None:
            nonlocal said
            said = (said + piece)[-_HEARD:]
            show(piece)

        ending = run_verb(arguments, self.folder, hear, limit=limit)
        if ending.status and not ending.stopped:
            last = said.strip().rpartition("\n")[2].removeprefix("error: ")
            raise OpenELMError(f"openelm {arguments[0]} ended with status {ending.status}: {last}")
        return ending


def _copy(source: Path, folder: Path) -> None:
    """Copy the files of a folder, but not that they may only be read."""
    folder.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, folder / file.name)


def _described(model: Summary) -> str:
    layers, heads = model.layers, [layer.query_heads for layer in model.layers]
    return (
        f"{model.parameters / 1e6:.1f} million parameters; {len(layers)} layers that grow from {heads[0]} heads and "
        f"{layers[0].ffn_dim} feed-forward units to {heads[-1]} and {layers[-1].ffn_dim}"
    )


def _blas() -> str:
    return f"; BLAS: {device.blas()}" if device.backend() == "cpu" else ""


def _megabytes(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.1f} MB"


def _speed(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table of speeds from one of a bench result."""
    return (
        row["model"],
        f"{row['weight_bytes'] / 1e6:.1f}",
        f"{row['generation_tps']['median']:,.0f}",
        f"{row['ceiling_tps']:,.0f}",
        f"{row['share']:.0%}",
    )


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    """What holds the speed back."""
    best = max(row["share"] for row in rows)
    if best > 1:
        return "That is above the ceiling: weights this small stay in the processor's caches and are not read again."
    if best > _NEAR:
        return "That is near the ceiling: reading memory is what holds it back."
    return (
        "That is far below the ceiling. A model this small is read in no time; starting its operations, some hundred a "
        "token, is what takes long. The larger a model, the nearer it comes to the ceiling."
    )


def _activation() -> list[tuple[str, str]]:
    """How `openelm` is found, where it is not on the PATH."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("openelm") or not script.is_file():
        return []
    with suppress(ValueError):
        script = script.relative_to(Path.cwd())
    return [("once in each terminal", f"source {shlex.quote(str(script))}")]
