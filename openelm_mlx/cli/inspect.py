"""``openelm inspect``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openelm_mlx.cli.default_model import model_or_demo
from openelm_mlx.layer_paths import grouped

if TYPE_CHECKING:
    from openelm_mlx.summary import Summary

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model folder, Hugging Face Hub name, or a size such as OpenELM-270M; the embedded demonstration "
            "model by default.",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw parameters by layer into this PNG file.", show_default=False)
    ] = None,
) -> None:
    """Show a model's layers, sizes, quantization and origin.

    Reads headers only; no weights are loaded.
    """
    from openelm_mlx.summary import summarize

    summary = summarize(model_or_demo(model), revision)
    if plot:
        _plot(summary, plot)
    if as_json:
        print(json.dumps(_as_json(summary), indent=2))
    else:
        _print(summary)


def _as_json(s: Summary) -> dict[str, Any]:
    import dataclasses

    values = dataclasses.asdict(s)
    values["config"] = s.config.to_dict()
    values["runtime"] = _runtime()
    return values


def _runtime() -> dict[str, str | None]:
    import mlx.core as mx

    from openelm_mlx import device
    from openelm_mlx.dtypes import dtype_name

    backend = device.backend()
    return {
        "backend": backend,
        "compute_dtype": dtype_name(device.compute_dtype(mx.bfloat16)) if backend == "cpu" else "as stored",
        "blas": device.blas() if backend == "cpu" else None,
    }


def _print(s: Summary) -> None:
    # Padded by hand: a table that adapts to the terminal would drop digits in a narrow one.
    print("layer  query heads  kv heads  FFN width  parameters")
    for x in s.layers:
        print(f"{x.layer:5}  {x.query_heads:11}  {x.kv_heads:8}  {x.ffn_dim:9}  {x.parameters:10,}")
    print(*_lines(s), sep="\n")


def _lines(s: Summary) -> list[str]:
    c = s.config
    sizes = ", ".join(f"{name} {n / 1e6:,.1f} MB" for name, n in s.bytes_by_precision.items())
    window = s.kv_bytes_per_token * c.max_context_length
    lines = [
        "",
        f"model         {s.name}" + (f" ({s.preset})" if s.preset and s.preset != s.name else ""),
        f"parameters    {s.parameters:,} ({s.embedding_parameters:,} in the embedding"
        f"{', tied to the output head' if c.share_input_output_layers else ''})",
        f"dimensions    {c.num_transformer_layers} layers, width {c.model_dim}, heads of {c.head_dim}, "
        f"vocabulary {c.vocab_size:,}, window {c.max_context_length:,}",
        f"weights       {sizes}",
        f"KV cache      {s.kv_bytes_per_token:,} bytes a token, {window / 1e6:,.1f} MB a full window (16 bits)",
    ]
    if s.stored_bytes is not None:
        stored = ", ".join(f"{n / 1e6:,.1f} MB {dtype}" for dtype, n in sorted(s.stored_dtypes.items()))
        lines += [f"stored        {s.stored_bytes / 1e6:,.1f} MB ({stored})", f"quantization  {_quantization(s)}"]
        lines += [f"tokenizer     {s.tokenizer or 'none'}"]
    if s.provenance:
        lines += _provenance(s.provenance)
    runtime = _runtime()
    unpacked = f", packed weights unpacked to {s.bytes_by_precision['fp32'] / 1e6:,.1f} MB if memory allows"
    runs_on = f"{runtime['backend']}, computing in {runtime['compute_dtype']}"
    lines += [f"runs on       {runs_on}{unpacked if s.quantization and runtime['backend'] == 'cpu' else ''}"]
    return [*lines, f"BLAS          {runtime['blas']}"] if runtime["blas"] else lines


def _quantization(s: Summary) -> str:
    if not s.quantization:
        return "none"
    kept = grouped(path for path, value in s.quantization.items() if value is False)
    text = f"{s.quantization.get('bits')} bits in groups of {s.quantization.get('group_size')}"
    return f"{text}; in full precision: {', '.join(kept)}" if kept else text


def _provenance(p: dict[str, Any]) -> list[str]:
    hashes = p.get("source_sha256")
    commit = f" at {p['source_commit']}" if p.get("source_commit") else ""
    origin = f"from {p.get('source')}{commit} ({p.get('source_kind')}) to {p.get('precision')}"
    if p.get("source_kind") == "finetune":
        origin = f"from {p.get('source')}, all weights, in {p.get('precision')}"
    done = "fine-tuned   " if p.get("source_kind") == "finetune" else "converted    "
    fused = p.get("fused")
    return [
        f"{done} {origin} by openelm-mlx {p.get('tool_version')}",
        *(f"              {digest}  {name}" for name, digest in (hashes.items() if isinstance(hashes, dict) else ())),
        *(
            f"fused         with {f.get('adapter')} ({f.get('method')} of rank {f.get('rank')})"
            for f in (fused if isinstance(fused, list) else ())
            if isinstance(f, dict)
        ),
    ]


def _plot(s: Summary, path: Path) -> None:
    from openelm_mlx import plotting

    attention = [s.config.head_dim * s.config.model_dim * (2 * x.query_heads + 2 * x.kv_heads) for x in s.layers]
    width = [x.layer for x in s.layers]
    rest = [x.parameters - a for x, a in zip(s.layers, attention, strict=True)]
    with plotting.png(path) as figure:
        axes = figure.subplots()
        axes.bar(width, [n / 1e6 for n in attention], label="attention")
        axes.bar(width, [n / 1e6 for n in rest], bottom=[n / 1e6 for n in attention], label="feed-forward and norms")
        title = f"{s.preset or Path(s.name).name}: parameters by layer"
        axes.set(xlabel="layer", ylabel="million parameters", title=title)
        axes.legend()
