"""Every layout a checkpoint comes in gives the same tensors; everything else is refused and left alone."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import yaml

from openelm_mlx.config import PRESETS
from openelm_mlx.convert.job import Result, convert
from openelm_mlx.convert.sources import corenet as corenet_reader
from openelm_mlx.convert.sources import open_source
from openelm_mlx.errors import CheckpointError, ConfigError, OpenELMError
from tests.support import sources
from tests.support.sources import Array, as_float, corenet_names, written
from tests.support.torch_writer import BF16, bf16, save_torch

WEIGHTS = sources.weights(sources.config())


def to_fp32(source: Path, out: Path, **options: Any) -> Result:
    return convert(source, out, precision="fp32", **{"tokenizer": "none", **options})


def assert_equal(folder: Path, expected: Mapping[str, Array | BF16] = WEIGHTS) -> None:
    """What was written are these tensors, bit for bit, as MLX itself reads them."""
    found = written(folder)
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert found[name].dtype == mx.float32
        np.testing.assert_array_equal(np.asarray(found[name]), as_float(x), err_msg=name)


def refusal(source: Path, out: Path, kind: type[OpenELMError] = CheckpointError, **options: Any) -> str:
    """The message of the error; nothing may have been written."""
    with pytest.raises(kind) as error:
        to_fp32(source, out, **options)
    assert not out.exists()
    assert list(out.parent.glob(".*")) == []
    return str(error.value)


# Hugging Face folders.


@pytest.mark.parametrize("torch", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("shards", [1, 3])
def test_hugging_face_folders(tmp_path: Path, torch: bool, shards: int) -> None:
    source = sources.hf(tmp_path / "source", torch=torch, shards=shards)
    result = to_fp32(source, tmp_path / "out")
    assert_equal(result.folder)
    recorded = json.loads((result.folder / "config.json").read_text())["openelm_mlx"]
    assert recorded["source_kind"] == "huggingface"
    assert set(recorded["source_sha256"]) == {p.name for p in source.iterdir() if p.suffix in (".bin", ".safetensors")}


@pytest.mark.parametrize("torch", [False, True], ids=["safetensors", "bin"])
def test_tensors_of_several_dtypes_in_one_file(tmp_path: Path, torch: bool) -> None:
    tensors = sources.mixed(WEIGHTS)
    assert_equal(to_fp32(sources.hf(tmp_path / "source", tensors, torch=torch), tmp_path / "out").folder, tensors)


def test_an_untied_head(tmp_path: Path) -> None:
    tensors = sources.weights(sources.config(share_input_output_layers=False))
    hf = sources.hf(tmp_path / "hf", tensors, share_input_output_layers=False)
    pt = sources.corenet(tmp_path / "corenet", tensors, share_input_output_layers=False)
    for source in (hf, pt):
        assert_equal(to_fp32(source, tmp_path / f"out-{source.name}").folder, tensors)


def test_files_with_each_others_names(tmp_path: Path) -> None:
    """What a file is called says nothing about what is in it."""
    bin_as_safetensors = sources.hf(tmp_path / "a", torch=True)
    (bin_as_safetensors / "pytorch_model.bin").rename(bin_as_safetensors / "model.safetensors")
    safetensors_as_bin = sources.hf(tmp_path / "b")
    (safetensors_as_bin / "model.safetensors").rename(safetensors_as_bin / "pytorch_model.bin")
    corenet_as_bin = sources.corenet(tmp_path / "c", name="pytorch_model.bin").parent
    safetensors_as_pt = tmp_path / "d" / "checkpoint.pt"
    sources.corenet(tmp_path / "d")
    sources.write_safetensors(safetensors_as_pt, corenet_names(WEIGHTS))
    hf_as_pt = sources.hf(tmp_path / "e") / "weights.pt"
    (hf_as_pt.parent / "model.safetensors").rename(hf_as_pt)
    for source in (bin_as_safetensors, safetensors_as_bin, corenet_as_bin, safetensors_as_pt, hf_as_pt):
        assert_equal(to_fp32(source, tmp_path / f"out-{source.parent.name}-{source.name}").folder)


def test_one_file_of_a_hugging_face_folder(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "source")
    assert_equal(to_fp32(source / "model.safetensors", tmp_path / "out").folder)
    (source / "config.json").rename(tmp_path / "elsewhere.json")
    assert "need their config.json (--config)" in refusal(source, tmp_path / "no", ConfigError)
    assert_equal(to_fp32(source, tmp_path / "given", config=tmp_path / "elsewhere.json").folder)


def test_an_mlx_folder_in_full_precision_is_a_source_and_a_packed_one_is_not(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "source")
    full = to_fp32(source, tmp_path / "full")
    assert_equal(to_fp32(full.folder, tmp_path / "again").folder)
    packed = convert(source, tmp_path / "packed", precision="4bit", group_size=32, tokenizer="none")
    assert "is quantized already" in refusal(packed.folder, tmp_path / "no")
    config = json.loads((packed.folder / "config.json").read_text())
    del config["quantization"]
    (packed.folder / "config.json").write_text(json.dumps(config))
    assert "is quantized already" in refusal(packed.folder, tmp_path / "no")


# CoreNet checkpoints.


def test_a_corenet_file_with_the_yaml_beside_it(tmp_path: Path) -> None:
    pt = sources.corenet(tmp_path / "run")
    result = to_fp32(pt, tmp_path / "out")
    assert_equal(result.folder)
    recorded = json.loads((result.folder / "config.json").read_text())["openelm_mlx"]
    assert recorded["source_kind"] == "corenet"
    assert_equal(to_fp32(pt.parent, tmp_path / "out2").folder)


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_a_corenet_file_with_its_config_given(tmp_path: Path, suffix: str) -> None:
    pt = sources.corenet(tmp_path / "run", yaml_name=f"tiny{suffix}")
    given = tmp_path / f"given{suffix}"
    (tmp_path / "run" / f"tiny{suffix}").rename(given)
    assert "give its CoreNet YAML with --config" in refusal(pt, tmp_path / "no")
    assert_equal(to_fp32(pt, tmp_path / "out", config=given).folder)
    assert_equal(to_fp32(pt.parent, tmp_path / "folder", config=given).folder)


def test_the_config_given_wins_over_the_one_beside(tmp_path: Path) -> None:
    pt = sources.corenet(tmp_path / "run")
    given = tmp_path / "other.yaml"
    given.write_text(
        (pt.parent / "openelm.yaml").read_text().replace("max_context_length: 64", "max_context_length: 32")
    )
    assert to_fp32(pt, tmp_path / "out", config=str(given)).config.max_context_length == 32


def test_a_config_json_for_a_corenet_file(tmp_path: Path) -> None:
    pt = sources.corenet(tmp_path / "run", yaml_name=None)
    (tmp_path / "hf.json").write_text(json.dumps(sources.config()))
    assert_equal(to_fp32(pt, tmp_path / "out", config=tmp_path / "hf.json").folder)


WRAPPINGS: dict[str, Callable[[OrderedDict[str, Any]], object]] = {
    "state dict": lambda state: {"state_dict": state, "epoch": 3},
    "corenet": lambda state: {"epoch": 1, "model_state_dict": state, "optim_state_dict": {"lr": 0.1}},
    "ddp": lambda state: OrderedDict((f"module.{name}", x) for name, x in state.items()),
    "compiled": lambda state: {"model": OrderedDict((f"_orig_mod.{name}", x) for name, x in state.items())},
    "both": lambda state: {"model": OrderedDict((f"module._orig_mod.{name}", x) for name, x in state.items())},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_training_checkpoints(tmp_path: Path, wrapping: str) -> None:
    pt = sources.corenet(tmp_path / "run", wrap=WRAPPINGS[wrapping], name="training_checkpoint_last.pt")
    assert_equal(to_fp32(pt, tmp_path / "out").folder)


def test_tensors_that_are_views_are_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source tensor stored transposed (strides), converted in several blocks."""
    from openelm_mlx.convert import precision

    monkeypatch.setattr(precision, "_BLOCK", 1000)
    source = open_source(sources.corenet(tmp_path / "run"))
    name = "transformer.layers.1.attn.out_proj.weight"  # square
    tensor = source.tensors[name]
    turned = {name: type(tensor)(tensor.path, tensor.offset, tensor.dtype, tensor.shape, (1, 64))}
    plan = precision.plan_precision(source.config, "fp32", 64)
    (x,) = precision.converted(turned, {name: (60, 64)}, plan)
    np.testing.assert_array_equal(np.asarray(x), WEIGHTS[name].T[:60])


@pytest.mark.parametrize("rows", [32_000, 32_128])
def test_without_a_yaml_the_shapes_name_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    tiny = {k: v for k, v in sources.TINY.items() if k not in ("vocab_size", "max_context_length")}
    pairs = {k: tuple(v) if isinstance(v, list) else v for k, v in tiny.items()}
    monkeypatch.setattr(corenet_reader, "PRESETS", {**PRESETS, "OpenELM-tiny": pairs})
    monkeypatch.setattr("openelm_mlx.config.PRESETS", {**PRESETS, "OpenELM-tiny": pairs})
    tensors = sources.weights(sources.config(vocab_size=rows))
    pt = sources.corenet(tmp_path / "run", tensors, yaml_name=None)
    result = to_fp32(pt, tmp_path / "out")
    assert result.config.vocab_size == rows
    assert result.config.preset_name == "OpenELM-tiny"
    assert_equal(result.folder, tensors)
    smaller = sources.weights(sources.config(vocab_size=rows - 1))
    other = sources.corenet(tmp_path / "other", smaller, yaml_name=None)
    message = refusal(other, tmp_path / "no")
    assert "match none of OpenELM-270M, OpenELM-450M, OpenELM-1_1B, OpenELM-3B, OpenELM-tiny" in message
    assert f"(embedding ({rows - 1}, 64), {len(tensors)} tensors)" in message


def test_a_preset_by_name_with_values_that_override_it(tmp_path: Path) -> None:
    section = {"model_name": "OpenELM-450M", "vocab_size": 32128, "max_context_length": 1024, "padding_index": None}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"model": {"language_modeling": {"general_gpt": section}}}))
    config = corenet_reader.config_from_yaml(tmp_path / "x.yaml")
    assert (config.model_dim, config.num_transformer_layers) == (1536, 20)
    assert (config.vocab_size, config.max_context_length) == (32128, 1024)


def test_of_two_yaml_files_the_right_one_must_be_named(tmp_path: Path) -> None:
    pt = sources.corenet(tmp_path / "run")
    (pt.parent / "other.yml").write_text("a: 1")
    assert "of the YAML files here (openelm.yaml, other.yml) name the right one" in refusal(pt, tmp_path / "no")
    assert_equal(to_fp32(pt, tmp_path / "out", config=pt.parent / "openelm.yaml").folder)


BAD_YAML = {
    "a: [1, 2": "not readable as YAML",
    "- a\n- b": "has no section model.language_modeling.general_gpt",
    "just text": "has no section",
    "": "has no section",
    "model: {language_modeling: [1]}": "has no section",
    "model: {language_modeling: {general_gpt: {vocab_size: 500}}}": "model_name is missing; known are OpenELM-270M",
    "model: {language_modeling: {general_gpt: {model_name: OpenELM-7B}}}": "model_name is 'OpenELM-7B'; known are",
    "model: {language_modeling: {general_gpt: {model_name: [1, 2]}}}": "model_name is a list; known are",
    "model: {language_modeling: {general_gpt: {model_name: OpenELM-3B, model_dim: wide}}}": "model_dim must be",
    "model: {language_modeling: {general_gpt: {model_dim: 64}}}": "the config has no vocab_size",
    "!!python/object/apply:os.system ['true']": "not readable as YAML",
    "!!int ''": "not readable as YAML",
    "\x00": "not readable as YAML",
    "x" * 1_000_001: "too large for what it is taken for",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_YAML, ids=lambda text: text[-40:].encode("unicode_escape").decode())
def test_a_yaml_that_is_no_config(tmp_path: Path, text: str) -> None:
    pt = sources.corenet(tmp_path / "run")
    (pt.parent / "openelm.yaml").write_text(text)
    message = refusal(pt, tmp_path / "out", ConfigError)
    assert message.startswith(f"{pt.parent / 'openelm.yaml'}: ")
    assert BAD_YAML[text] in message
    assert "\n" not in message


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    pt = sources.corenet(tmp_path / "run")
    hf = sources.hf(tmp_path / "hf")
    assert "no such file" in refusal(pt, tmp_path / "out", ConfigError, config=tmp_path / "x.yaml")
    assert "no such file" in refusal(hf, tmp_path / "out", ConfigError, config=tmp_path / "x.json")


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"model_type": "llama", "hidden_size": 1}', '{"model_dim": "x"}', "{"]
)
def test_a_hugging_face_config_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    source = sources.hf(tmp_path / "hf")
    (source / "config.json").write_text(content)
    assert refusal(source, tmp_path / "out", ConfigError).startswith(f"{source / 'config.json'}: ")


# What is no checkpoint of an OpenELM.


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    expected = "expected config.json with model*.safetensors or pytorch_model*.bin (Hugging Face), or one .pt file"
    message = refusal(folder, tmp_path / "out")
    assert expected in message
    assert message.endswith("found nothing")
    (folder / "README.md").write_text("hello")
    assert refusal(folder, tmp_path / "out").endswith("found README.md")
    (folder / "config.json").write_text(json.dumps(sources.config()))
    assert refusal(folder, tmp_path / "out").endswith("found README.md, config.json")
    save_torch({}, folder / "a.pt")
    save_torch({}, folder / "b.pt")
    assert refusal(folder, tmp_path / "out").endswith("found README.md, a.pt, b.pt, config.json")


def test_another_models_checkpoint(tmp_path: Path) -> None:
    llama = {"model.embed_tokens.weight": np.ones((4, 4), np.float32), "model.norm.weight": np.ones(4, np.float32)}
    source = sources.hf(tmp_path / "llama", llama)
    message = refusal(source, tmp_path / "out")
    assert "these are not OpenELM's tensors (found model.embed_tokens.weight, model.norm.weight; expected" in message
    save_torch(OrderedDict(llama), tmp_path / "llama.pt")
    assert "these are not OpenELM's tensors" in refusal(tmp_path / "llama.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found an empty file"),
        (b"Once upon a time, there was", "found bytes that are neither"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"<!doctype html><title>Sign in</title>", "a web page"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "checkpoint.pt"])
def test_files_that_are_no_weights(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sources.config()))
    (folder / name).write_bytes(content)
    assert message in refusal(folder, tmp_path / "out")
    assert message in refusal(folder / name, tmp_path / "out")


@pytest.mark.parametrize("torch", [False, True], ids=["safetensors", "bin"])
def test_a_file_cut_short(tmp_path: Path, torch: bool) -> None:
    source = sources.hf(tmp_path / "source", torch=torch)
    file = source / ("pytorch_model.bin" if torch else "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    assert "cut short" in refusal(source, tmp_path / "out")


def test_a_file_that_shrinks_while_it_is_converted(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "source")
    file = source / "model.safetensors"
    from openelm_mlx.progress import Progress

    def shrink(done: int, total: int) -> None:
        with file.open("r+b") as f:
            f.truncate(20_000)

    assert "changed or was truncated" in refusal(source, tmp_path / "out", progress=Progress(bytes_read=shrink))


def test_an_index_with_a_tensor_that_its_shards_lack(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "source", {n: x for n, x in WEIGHTS.items() if "norm" not in n}, shards=2)
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= {n: "model-00001-of-00002.safetensors" for n in WEIGHTS if "norm" in n}
    index.write_text(json.dumps(content))
    message = refusal(source, tmp_path / "out")
    assert f"missing ({sum('norm' in n for n in WEIGHTS)}): " in message
    assert "transformer.norm.weight" in message


def test_everything_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    tensors: dict[str, Array] = dict(WEIGHTS)
    del tensors["transformer.norm.weight"], tensors["transformer.layers.0.attn.q_norm.weight"]
    tensors["transformer.layers.2.ffn.proj_1.weight"] = np.ones((2, 2), np.float32)
    tensors["transformer.layers.1.ffn_norm.weight"] = np.ones(65, np.float32)
    source = sources.hf(tmp_path / "hf", tensors)
    assert refusal(source, tmp_path / "out").splitlines() == [
        f"{source}: the tensors do not fit the config",
        "  missing (2): transformer.layers.0.attn.q_norm.weight; transformer.norm.weight",
        "  unexpected (1): transformer.layers.2.ffn.proj_1.weight",
        "  wrong shape (1): transformer.layers.1.ffn_norm.weight is (65,), not (64,)",
    ]


def test_weights_must_be_floating_point_numbers(tmp_path: Path) -> None:
    tensors = dict(WEIGHTS)
    tensors["transformer.norm.weight"] = np.ones(64, np.int8)
    source = sources.hf(tmp_path / "hf", tensors)
    assert "tensor 'transformer.norm.weight' is I8; weights are floating-point" in refusal(source, tmp_path / "out")


def test_float64_is_read_as_float32(tmp_path: Path) -> None:
    tensors = {n: x.astype(np.float64) for n, x in WEIGHTS.items()}
    assert_equal(to_fp32(sources.hf(tmp_path / "hf", tensors), tmp_path / "out").folder)


def test_a_bfloat16_source_keeps_its_bits(tmp_path: Path) -> None:
    tensors = {n: bf16(x) for n, x in WEIGHTS.items()}
    for source in (sources.hf(tmp_path / "hf", tensors), sources.hf(tmp_path / "bin", tensors, torch=True)):
        out = convert(source, tmp_path / f"out-{source.name}", tokenizer="none").folder
        found = written(out)
        for name, x in tensors.items():
            np.testing.assert_array_equal(np.asarray(found[name].view(mx.uint16)), x.bits)
