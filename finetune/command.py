"""``openelm finetune``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openelm_mlx.cli.status_line import status_line
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.options import add_options

if TYPE_CHECKING:
    from openelm_mlx.finetune.job import Outcome
    from openelm_mlx.finetune.settings import Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@add_options
def finetune(
    given: dict[str, Any],
    out: Annotated[str | None, typer.Option("--out", "-o", help="The run's folder, to be made.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Settings to begin with: a recipe's name, or a YAML file.", metavar="NAME|FILE")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with a run that was stopped, however it was.", metavar="RUN")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the first batch, token by token, and train nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier run's folder; try what may not fit into memory.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Fine-tune a model on your own data: LoRA, DoRA, or all weights.

    The run's folder holds the adapter (or the model), checkpoints, metrics and a plot. A run that is stopped goes on
    with --resume, and ends as if it had never stopped; beside it a lower --learning-rate or more --epochs can be given.
    """
    if resume is not None:
        _check_alone(out=out, recipe=recipe, dry_run=dry_run)
        _run(None, Path(resume), changes=given, force=force, quiet=quiet)
        return
    from openelm_mlx.finetune import recipes

    settings = recipes.resolve(recipe, given)
    if settings.model is None and settings.init == "model":
        raise OpenELMError("name a model: --model FOLDER or HUB-NAME")
    if dry_run:
        _show(settings)
        return
    if out is None:
        raise OpenELMError("name a folder for the run: --out RUN (or --dry-run to look at the data first)")
    _run(settings, Path(out), changes={}, force=force, quiet=quiet)


def _check_alone(**others: object) -> None:
    more = [name for name, value in others.items() if value]
    if more:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in more)
        raise OpenELMError(f"--resume goes on with a run in its own folder; leave out {flags}")


def _show(settings: Settings) -> None:
    from openelm_mlx.finetune.job import dry_run

    lines = dry_run(settings, say=lambda line: print(line, file=sys.stderr), reading=_reading(False))
    print(*lines, sep="\n")


def _run(settings: Settings | None, folder: Path, *, changes: dict[str, Any], force: bool, quiet: bool) -> None:
    from openelm_mlx.finetune import job
    from openelm_mlx.finetune.progress import progress
    from openelm_mlx.finetune.run_folder import RunFolder
    from openelm_mlx.finetune.trainer import Stopped
    from openelm_mlx.finetune.watching import Watchers

    watcher = Watchers([progress(quiet=quiet)])  # a reader of stderr who leaves must not end a run
    more: dict[str, Any] = {"watcher": watcher, "reading": _reading(quiet), "on_signal": partial(_stopping, quiet)}
    try:
        if settings is None:
            outcome = job.resume(folder, changes=changes, force=force, **more)
        else:
            outcome = job.finetune(settings, folder, force=force, **more)
    except Stopped as e:
        print(f"stopped and saved; {RunFolder(folder).way_on()}", file=sys.stderr)
        raise typer.Exit(128 + e.signum) from None
    if not quiet:
        print(*_summary(outcome), sep="\n")


def _stopping(quiet: bool) -> None:
    """Say that a signal was heard, without the locks of what may be printing just now."""
    if not quiet:
        with suppress(OSError):
            os.write(2, b"stopping after this update (again to stop at once)\n")


def _reading(quiet: bool) -> Callable[[int, int], None] | None:
    """How far reading is, in one line that what follows replaces."""
    show = status_line(quiet=quiet)
    if show is None:
        return None
    return lambda done, total: show(f"reading the data: {100 * done // max(total, 1)}%" if done < total else "")


def _summary(o: Outcome) -> list[str]:
    state = o.state
    lines = [f"{o.folder}: updates: {state.step:,}"]
    if o.first_loss is not None and state.best_loss is not None:
        lines.append(
            f"validation loss {o.first_loss:.4f} before, {state.best_loss:.4f} after update {state.best_step:,} (kept)"
        )
    if o.test is not None:
        more = "perplexity {perplexity:.3f}" if "perplexity" in o.test else "accuracy {test_accuracy:.1%}"
        lines.append(f"test loss {{test_loss:.4f}}, {more}".format(**o.test))
    if (o.folder / "adapters.safetensors").exists():
        what = f"--model {shlex.quote(o.model)} --adapter {shlex.quote(str(o.folder))}"
    else:
        what = f"--model {shlex.quote(str(o.folder))}"
    lines.append(f"try it: openelm generate {what}{' --raw' if o.raw else ''} --prompt ...")
    return lines
