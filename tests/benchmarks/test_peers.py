"""The peers themselves, in this process: who takes part, the clock, and what llama-bench's output means."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from openelm_mlx.benchmarks import peers
from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.peers import clock, llamacpp, mlxlm, pytorch
from openelm_mlx.benchmarks.peers.base import Contender, Job, LeftOut, Paths, packed_bits
from openelm_mlx.benchmarks.peers.onmlx import to_float32
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import OpenELMError
from openelm_mlx.loading import parameter_shapes
from openelm_mlx.model import OpenELM
from tests.benchmarks.fakes import SUBJECT, FakeBench
from tests.support.models import converted_folder, golden_config, golden_model

PACKED = Subject(name="270M", preset="OpenELM-270M", precision="4bit")


def names(found: list[Contender]) -> list[str]:
    return [contender.name for contender in found]


# Who takes part.


def test_what_is_not_there_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mlxlm, pytorch):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    found, lines = peers.contenders(peers.PEERS, SUBJECT, "cpu")
    assert names(found) == ["openelm-mlx"]
    assert lines == [
        "mlx-lm: left out: it is not installed (pip install mlx-lm)",
        "corenet: left out: no path of a CoreNet checkout given",
        "llama.cpp: left out: no path of its llama-bench given",
        "pytorch: left out: no path of a Python that has it given",
    ]


def test_paths_that_lead_nowhere_are_lines(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text("no program: it may not be run")
    paths = Paths(corenet=tmp_path, llama_bench=program, gguf=tmp_path / "none.gguf", torch_python=tmp_path / "python")
    found, lines = peers.contenders(["corenet", "llama.cpp", "pytorch"], SUBJECT, "cpu", paths)
    assert found == []
    assert [line.partition(": left out: ")[0] for line in lines] == ["corenet", "llama.cpp", "pytorch"]
    assert "no CoreNet checkout" in lines[0]
    assert f"{program}: no program" in lines[1]
    assert f"{tmp_path / 'python'}: no such program" in lines[2]
    program.chmod(0o755)
    assert "none.gguf: no such file" in peers.contenders(["llama.cpp"], SUBJECT, "cpu", paths)[1][0]


def test_variants_are_those_of_the_backend(tmp_path: Path) -> None:
    port = tmp_path / "mlx_examples" / "open_elm"
    port.mkdir(parents=True)
    (port / "open_elm.py").touch()
    paths = Paths(corenet=tmp_path, torch_python=Path(sys.executable))
    openblas = sys.platform == "linux"
    on_cpu, _ = peers.contenders(["mlx-lm", "corenet", "pytorch"], SUBJECT, "cpu", paths)
    assert names(on_cpu) == [
        "mlx-lm",
        *(["mlx-lm (float32, OpenBLAS)"] if openblas else []),
        "corenet",
        *(["corenet (float32, OpenBLAS)"] if openblas else []),
        "pytorch (float32)",
        "pytorch (bfloat16)",
    ]
    on_gpu, _ = peers.contenders(["mlx-lm", "corenet"], SUBJECT, "metal", paths)
    assert names(on_gpu) == ["mlx-lm", "corenet"]
    packed, lines = peers.contenders(["corenet", "pytorch"], PACKED, "metal", paths)
    assert packed == []
    assert lines == [
        "corenet: left out: its packed models need MLX 0.10.0",
        "pytorch: left out: no 4-bit layers in plain PyTorch",
    ]


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(OpenELMError, match=r"no peer 'vllm'.*there are openelm-mlx, mlx-lm"):
        peers.contenders(["vllm"], SUBJECT, "cpu")


def test_bits_of_packed_models(tmp_path: Path) -> None:
    assert packed_bits(PACKED) == 4
    assert packed_bits(SUBJECT) is None
    assert packed_bits(Subject(name="x", folder=converted_folder(tmp_path / "x", "8bit"))) == 8
    with pytest.raises(OpenELMError, match="precision '5bit' is not known"):
        packed_bits(Subject(name="x", preset="OpenELM-270M", precision="5bit"))


@pytest.mark.parametrize("case", ["tiny-tied", "tiny-untied", "tiny-no-qk-norm", "tiny-no-glu"])
def test_parameters_are_counted(case: str) -> None:
    config = golden_config(case)
    assert config.parameters == sum(math.prod(s) for s in parameter_shapes(OpenELM(config)).values())


def test_parameters_of_the_smallest_release() -> None:
    assert OpenELMConfig.preset("OpenELM-270M").parameters == 271_527_168  # as llama.cpp counts them


def test_jobs_travel_as_json() -> None:
    job = Job(Contender(peer="mlx-lm", dtype="float32"), SUBJECT.to_json(), SUBJECT.config().to_dict(), "cpu")
    assert Job.from_json(job.to_json()) == job
    assert job.folder is None


def test_float32_keeps_the_values() -> None:
    model = golden_model("tiny-tied")
    nn.quantize(model, 32, 4)
    model.set_dtype(mx.bfloat16)
    packed = (model.transformer.token_embeddings, model.transformer.layers[1].ffn.proj_2)
    expected = [
        mx.dequantize(p.weight, p.scales.astype(mx.float32), p.biases.astype(mx.float32), group_size=32, bits=4)
        for p in packed
    ]
    to_float32(model)
    assert mx.array_equal(model.transformer.token_embeddings.weight, expected[0])
    assert mx.array_equal(model.transformer.layers[1].ffn.proj_2.weight, expected[1])
    assert model(mx.array([[1, 2, 3]])).dtype == mx.float32
    assert not any(isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)) for layer in model.modules())


# The clock.


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def pieces(self, *sizes: int, prompt: float = 3.0, step: float = 0.5) -> Iterator[list[int]]:
        """Pieces of such sizes; the first after `prompt` seconds, the others after `step` seconds a token."""
        token = 0
        for n, size in enumerate(sizes):
            self.now += step * size if n else prompt
            yield list(range(token, token + size))
            token += size


def test_the_first_token_ends_the_prompt_and_the_last_one_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    timing, tokens = clock.timed(Clock(monkeypatch).pieces(1, 1, 1, 1, 1), 36, 4, None)
    assert (timing.prompt_tokens, timing.prompt_s) == (36, 3.0)
    assert (timing.gen_tokens, timing.gen_s) == (4, 1.5)
    assert timing.generation_tps == 2
    assert tokens == [0, 1, 2, 3]


def test_tokens_read_in_pieces_count_each(monkeypatch: pytest.MonkeyPatch) -> None:
    timing, tokens = clock.timed(Clock(monkeypatch).pieces(1, 7, 2), 5, 10, None)
    assert tokens == list(range(10))
    assert (timing.gen_tokens, timing.gen_s) == (10, 4.5)


@pytest.mark.parametrize(("limit", "kept"), [(1e-9, 2), (0.5, 2), (0.6, 3), (100, 6)])
def test_a_time_limit_stops_between_tokens(monkeypatch: pytest.MonkeyPatch, limit: float, kept: int) -> None:
    timing, tokens = clock.timed(Clock(monkeypatch).pieces(1, 1, 1, 1, 1, 1), 36, 6, limit)
    assert len(tokens) == timing.gen_tokens == kept
    assert timing.generation_tps == 2


def test_one_token_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OpenELMError, match="after 1 of 6 tokens"):
        clock.timed(Clock(monkeypatch).pieces(1), 36, 6, None)


# llama.cpp.


def loaded(contender: Contender) -> llamacpp.LlamaCpp:
    return llamacpp.load(Job(contender, SUBJECT.to_json(), SUBJECT.config().to_dict(), "cpu"))


def test_llama_bench_measures_prompt_and_steps_apart(tmp_path: Path) -> None:
    fake = FakeBench(tmp_path)
    bench = loaded(fake.contender("llama-bench"))
    done = bench.run(list(range(36)), 17, None)
    assert fake.calls()[0][2:] == ["-m", str(fake.gguf), "-p", "36", "-n", "16", "-r", "1", "-o", "json"]
    assert (done.timing.prompt_tokens, done.timing.gen_tokens) == (36, 17)
    assert done.timing.prompt_s == pytest.approx(36 * 0.002)
    assert done.timing.generation_tps == pytest.approx(20)
    assert done.tokens == []
    said = bench.describe()
    assert (said.dtype, said.weight_bytes, said.vocab_size) == ("openelm 270M BF16", 543_142_912, 32000)
    assert said.kv_bytes_per_token == 2 * 2 * 64 * sum(SUBJECT.config().num_kv_heads)
    assert said.blas == "llama.cpp's CPU backend, 2 threads"
    assert said.versions == {"llama.cpp": "1 (0c1e570)"}


@pytest.mark.parametrize(
    ("before", "parameters", "why"),
    [
        ("sys.exit('one\\nerror: failed to load model')", None, "ended with status 1: error: failed to load model"),
        ("sys.exit(3)", None, "ended with status 3: nothing on stderr"),
        ("print('| model | size |')", None, "printed no JSON"),
        ("print('[]'); sys.exit()", None, "has no test of 0 prompt and 7 generated tokens"),
        ("", 7, "the model has 271,527,168 parameters, and this file 7"),
    ],
)
def test_llama_bench_that_fails_says_why(tmp_path: Path, before: str, parameters: int | None, why: str) -> None:
    contender = FakeBench(tmp_path).contender("llama-bench", before=before, parameters=parameters)
    with pytest.raises(LeftOut, match=why):
        loaded(contender).run([1, 2, 3], 8, None)
