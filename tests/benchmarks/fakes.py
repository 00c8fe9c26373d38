"""A program that answers as llama-bench does: what stands for peers wherever their own work does not matter."""

from __future__ import annotations

import sys
from pathlib import Path

from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.peers.base import Contender

# What llama-bench (build 0c1e570) printed for one test of an OpenELM file, but for what the script fills in.
_ROW = """{
    "build_commit": "0c1e570", "build_number": 1, "cpu_info": "AMD EPYC", "gpu_info": "", "backends": "CPU",
    "model_filename": "model.gguf", "model_type": "openelm 270M BF16", "model_size": 543142912,
    "model_n_params": 271527168, "n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "cpu_mask": "0x0",
    "cpu_strict": false, "poll": 50, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0,
    "split_mode": "layer", "main_gpu": 0, "no_kv_offload": false, "flash_attn": -1, "devices": "auto",
    "tensor_split": "0.00", "tensor_buft_overrides": "none", "load_mode": "auto", "lazy_mode": "auto",
    "embeddings": false, "no_op_offload": 0, "no_host": false, "repack": true, "fit_target": 0, "fit_min_ctx": 0,
    "n_prompt": 36, "n_gen": 0, "n_depth": 0, "test_time": "2026-11-30T17:27:34Z", "avg_ns": 267715774,
    "stddev_ns": 0, "avg_ts": 134.470971, "stddev_ts": 0.000000, "samples_ns": [ 267715774 ],
    "samples_ts": [ 134.471 ]
}"""

_SCRIPT = """#!{python} -IS
import json, os, sys, time
with open({log!r}, "a") as log:
    print({name!r}, os.getpid(), *sys.argv[1:], file=log)
{before}
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
row = json.loads({row!r}) | {{"model_n_params": {parameters}}}
prompt, steps = int(given["-p"]), int(given["-n"])
tests = [(prompt, 0, prompt * 2_000_000), (0, steps, steps * 50_000_000)]
print(json.dumps([row | {{"n_prompt": p, "n_gen": n, "avg_ns": ns, "samples_ns": [ns]}} for p, n, ns in tests]))
"""

SUBJECT = Subject(name="270M", preset="OpenELM-270M", precision="bf16")


class FakeBench:
    """Contenders whose llama-bench needs 2 ms a prompt token and 50 ms a generated one, without taking that long."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.gguf = folder / "model.gguf"
        self.gguf.write_bytes(b"GGUF")

    def contender(self, name: str, *, before: str = "", parameters: int | None = None) -> Contender:
        """One called `name`, which does the Python lines `before` first."""
        program = self.folder / name
        script = _SCRIPT.format(
            python=sys.executable,
            log=str(self.log),
            name=name,
            before=before,
            row=_ROW,
            parameters=SUBJECT.config().parameters if parameters is None else parameters,
        )
        program.write_text(script)
        program.chmod(0o755)
        return Contender(peer="llama.cpp", variant=name, path=str(program), gguf=str(self.gguf))

    def calls(self) -> list[list[str]]:
        """Name, process id and arguments of each call so far."""
        return [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def turns(self) -> list[tuple[str, int]]:
        """Name and decode steps of each call so far."""
        return [(call[0], int(call[call.index("-n") + 1])) for call in self.calls()]
