"""``openelm generate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openelm_mlx.cli.default_model import model_or_demo
from openelm_mlx.cli.status_line import status_line
from openelm_mlx.errors import OpenELMError
from openelm_mlx.settings import DEFAULT_MAX_TOKENS, Sampling

if TYPE_CHECKING:
    from openelm_mlx.generation import GenerationResponse
    from openelm_mlx.tokenizer import Tokenizer

_LONGEST_PROMPT = 1 << 25
"""Bytes read from standard input."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The prompt; - reads standard input.", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, or a Hugging Face Hub name; the embedded demonstration model by default.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Folder of a LoRA or DoRA adapter to run the model with.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = DEFAULT_MAX_TOKENS,
    system: Annotated[
        str | None, typer.Option(help="System turn before the prompt (models with a chat template).")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as raw text, without the chat template.")] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", "-t", help="0 is greedy.")
    ] = Sampling.temperature,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens that reach this mass; 1 is off.")
    ] = Sampling.top_p,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 is off.")] = Sampling.top_k,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this fraction of the likeliest; 0 is off.")
    ] = Sampling.min_p,
    repetition_penalty: Annotated[
        float, typer.Option(help="Make recent tokens less likely; 1 is off.")
    ] = Sampling.repetition_penalty,
    repetition_context_size: Annotated[
        int, typer.Option(help="How many of the last tokens are recent.")
    ] = Sampling.repetition_context_size,
    seed: Annotated[int | None, typer.Option(help="Make sampling repeatable.")] = Sampling.seed,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Compute in bfloat16, float16 or float32 instead of the default (what is stored; float32 on a CPU)."
        ),
    ] = None,
    cpu_weights: Annotated[
        str | None,
        typer.Option(
            help="What a CPU does with packed (4- and 8-bit) weights: float32 unpacks them, which is fast and takes "
            "eight times the memory of 4 bits; keep computes on them as they are. By default they are unpacked if "
            "memory allows."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no statistics.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Try even if the model does not fit in memory.")] = False,
) -> None:
    """Generate text from a prompt.

    The text goes to standard output and nothing else does; statistics go to standard error. A model with a chat
    template takes the prompt as one user turn.
    """
    text = _read_prompt(prompt)
    from openelm_mlx import hub
    from openelm_mlx.generation import stream_generate
    from openelm_mlx.loading import check_adapter, require_memory, start_loading
    from openelm_mlx.stopping import StopStrings
    from openelm_mlx.tokenizer import Tokenizer

    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "repetition_context_size": repetition_context_size,
        "seed": seed,
    }
    Sampling(**sampling), StopStrings(stop or ())  # a wrong value is refused before the model is loaded
    if adapter is not None:
        check_adapter(adapter)
    folder = hub.resolve(model_or_demo(model, quiet=quiet), revision=revision, quiet=quiet)
    if not force:
        require_memory(folder, dtype, cpu_weights, adapter)
    weights = start_loading(folder, adapter=adapter, dtype=dtype, cpu_weights=cpu_weights)
    for note in weights.notes:
        print(note, file=sys.stderr)
    tokenizer = Tokenizer.from_folder(folder)  # takes a while, in which the weights are read
    if tokenizer is None:
        raise OpenELMError(
            f"{folder}: has no tokenizer (no tokenizer.json or tokenizer.model), so no text can be generated; "
            "convert it again with --tokenizer FILE, FOLDER or HUB-NAME"
        )
    prompt_or_chat = _as_chat(tokenizer, text, system, raw)
    loaded = weights.finished()
    responses = stream_generate(
        loaded,
        tokenizer,
        prompt_or_chat,
        max_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
        prompt_progress_callback=_reading(quiet),
        **sampling,
    )
    seen = _Seen(print_text=not as_json)
    try:
        seen.follow(responses)
    except KeyboardInterrupt:
        seen.interrupted = True
    _finish(seen, loaded, as_json=as_json, quiet=quiet)
    if seen.interrupted:
        raise KeyboardInterrupt


def _reading(quiet: bool) -> Callable[[int, int], None] | None:
    """One line that the text then replaces: a long prompt takes seconds on a slow machine."""
    show = status_line(quiet=quiet)
    if show is None:
        return None
    return lambda done, total: show(f"reading the prompt: {done} of {total} tokens" if done < total else "")


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    data = sys.stdin.buffer.read(_LONGEST_PROMPT + 1)
    if len(data) > _LONGEST_PROMPT:
        raise OpenELMError(f"standard input has more than {_LONGEST_PROMPT:,} bytes, far more than a model's window")
    try:
        # The bytes, because the locale may say that they are something else. A line typed or piped ends in a newline
        # that is the terminal's, not the prompt's.
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as e:
        raise OpenELMError(f"standard input is not UTF-8 text: {e}") from None


def _as_chat(tokenizer: Tokenizer, text: str, system: str | None, raw: bool) -> str | list[dict[str, Any]]:
    if raw or not tokenizer.chat_template:
        if system is not None:
            why = "--raw skips it" if raw else "this model has none"
            raise OpenELMError(f"--system needs a chat template, and {why}")
        return text
    turns = [] if system is None else [{"role": "system", "content": system}]
    return [*turns, {"role": "user", "content": text}]


class _Seen:
    """The responses so far, printed as they come."""

    def __init__(self, *, print_text: bool) -> None:
        self.print_text = print_text
        self.text = ""
        self.tokens: list[int] = []
        self.last: GenerationResponse | None = None
        self.interrupted = False

    def follow(self, responses: Iterator[GenerationResponse]) -> None:
        for response in responses:
            if response.token is not None and response.generation_tokens > len(self.tokens):
                self.tokens.append(response.token)
            self.text += response.text
            self.last = response
            if self.print_text:
                print(response.text, end="", flush=True)


def _finish(seen: _Seen, model: Any, *, as_json: bool, quiet: bool) -> None:
    last = seen.last
    print(json.dumps(_json(seen, model)) if as_json else "", flush=True)
    if last and last.window_full:
        print(f"the model's window of {model.config.max_context_length} tokens is full", file=sys.stderr)
    if last and not (quiet or as_json):
        print(
            f"prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s · generation: "
            f"{last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s · first token after "
            f"{last.time_to_first_token:.2f} s · peak memory {last.peak_memory:.2f} GB",
            file=sys.stderr,
        )


def _json(seen: _Seen, model: Any) -> dict[str, Any]:
    from openelm_mlx import device
    from openelm_mlx.dtypes import dtype_name

    last = seen.last
    return {
        "text": seen.text,
        "tokens": seen.tokens,
        "prompt_tokens": last.prompt_tokens if last else None,
        "generation_tokens": len(seen.tokens),
        "prompt_tps": last.prompt_tps if last else None,
        "generation_tps": last.generation_tps if last else None,
        "time_to_first_token_s": last.time_to_first_token if last else None,
        "peak_memory_gb": last.peak_memory if last else None,
        "finish_reason": "interrupted" if seen.interrupted else last.finish_reason if last else None,
        "backend": device.backend(),
        "compute_dtype": dtype_name(model.transformer.norm.weight.dtype),
        "blas": device.blas() if device.backend() == "cpu" else None,
    }
