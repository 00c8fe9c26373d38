"""Adapters in folders: round trips, mlx-lm both ways, and every mismatch in one line that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from openelm_mlx.adapters import (
    AdapterConfig,
    AdapterError,
    adapter_from,
    adapters_of,
    attach,
    attach_adapter,
    check_fits,
    detach,
    precision_note,
    read_adapter,
)
from openelm_mlx.model import OpenELM
from tests.adapters.made import IDS, LINEARS_AND_EMBEDDING, array, logits, saved, trained_adapter
from tests.support.models import golden_config, golden_model

QKV = "transformer.layers.0.attn.qkv_proj"


@pytest.fixture
def model() -> OpenELM:
    return golden_model("tiny-tied")


@pytest.fixture
def folder(model: OpenELM, tmp_path: Path) -> Path:
    """A LoRA adapter of the model's linears."""
    return saved(tmp_path / "adapter", trained_adapter(model))


def stock(model: OpenELM) -> Any:
    """mlx-lm's model with the same weights."""
    from mlx_lm.models import openelm

    theirs = openelm.Model(openelm.ModelArgs.from_dict(model.config.to_dict()))
    pairs: Any = tree_flatten(model.parameters())
    theirs.load_weights(pairs)
    return theirs


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "adapter_config.json").read_text())
    change(values)
    (folder / "adapter_config.json").write_text(json.dumps(values))


def retensor(folder: Path, change: Callable[[dict[str, mx.array]], object]) -> None:
    tensors: Any = mx.load(str(folder / "adapters.safetensors"))
    change(tensors)
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)


def refusal(model: OpenELM, folder: Path) -> str:
    with pytest.raises(AdapterError) as error:
        attach_adapter(model, read_adapter(folder), folder)
    message = str(error.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    assert adapters_of(model) == {}, "nothing was attached"
    return message.removeprefix(str(folder))


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_there_and_back(model: OpenELM, tmp_path: Path, method: str) -> None:
    config = AdapterConfig(
        method=method, rank=3, alpha=7, dropout=0.1, rslora=True, targets=LINEARS_AND_EMBEDDING, layers="all"
    )
    attach(model, config)
    for layer in adapters_of(model).values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape)
    model.eval()
    expected = logits(model)
    adapter = adapter_from(model, config, precision="4bit", run="run1", steps=7)
    again = read_adapter(saved(tmp_path / "a", adapter))
    detach(model)
    assert (again.config, again.precision, again.base) == (config, "4bit", adapter.base)
    assert (again.origin, again.from_mlx_lm) == ({"run": "run1", "steps": 7}, False)
    assert again.tensors.keys() == adapter.tensors.keys()
    assert all(mx.array_equal(again.tensors[name], value) for name, value in adapter.tensors.items())
    attach_adapter(model, again, "a")
    assert not model.training
    np.testing.assert_array_equal(logits(model), expected)


def test_tensors_are_kept_in_float32(model: OpenELM, tmp_path: Path) -> None:
    adapter = trained_adapter(model)
    half = replace(adapter, tensors={name: value.astype(mx.bfloat16) for name, value in adapter.tensors.items()})
    saved(tmp_path / "a", half)
    stored: Any = mx.load(str(tmp_path / "a" / "adapters.safetensors"))
    assert {value.dtype for value in stored.values()} == {mx.float32}


class TestMlxLm:
    @pytest.mark.parametrize("method", ["lora", "dora"])
    @pytest.mark.parametrize("case", ["tiny-tied", "tiny-untied"])
    def test_it_reads_ours(self, tmp_path: Path, case: str, method: str) -> None:
        from mlx_lm.tuner.utils import load_adapters

        ours = golden_model(case)
        theirs, plain = stock(ours), logits(ours)
        adapter = trained_adapter(ours, method=method, alpha=6, rslora=True, layers="1-2")
        load_adapters(theirs, str(saved(tmp_path / "a", adapter))).eval()
        attach_adapter(ours, adapter, "a")
        np.testing.assert_allclose(logits(theirs), logits(ours), atol=5e-5)
        assert np.abs(logits(ours) - plain).max() > 0.1

    @pytest.mark.parametrize("method", ["lora", "dora"])
    def test_its_tuners_are_read(self, model: OpenELM, tmp_path: Path, method: str) -> None:
        """As its trainer leaves them: the last two layers, keys of its own form."""
        from mlx_lm.tuner.utils import linear_to_lora_layers

        theirs = stock(model)
        parameters = {"rank": 4, "scale": 3.5, "dropout": 0.0}
        theirs.freeze()
        linear_to_lora_layers(theirs, 2, parameters, use_dora=method == "dora")
        for layer in theirs.modules():
            if "lora_b" in layer:
                layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
        theirs.eval()
        folder = tmp_path / "theirs"
        folder.mkdir()
        trained: Any = tree_flatten(theirs.trainable_parameters())
        mx.save_safetensors(str(folder / "adapters.safetensors"), dict(trained))
        config = {"fine_tune_type": method, "num_layers": 2, "lora_parameters": parameters, "model": "x"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        adapter = read_adapter(folder)
        assert (adapter.config.method, adapter.config.rank, adapter.config.scale) == (method, 4, 3.5)
        assert (adapter.base, adapter.precision, adapter.from_mlx_lm) == (None, None, True)
        attach_adapter(model, adapter, folder)
        assert len(adapters_of(model)) == 2 * 4
        np.testing.assert_allclose(logits(model), logits(theirs), atol=5e-5)

    def test_its_adapters_of_a_tied_embedding_mean_something_else(self, tmp_path: Path) -> None:
        for case, tied in (("tiny-tied", True), ("tiny-untied", False)):
            model = golden_model(case)
            folder = saved(tmp_path / case, trained_adapter(model, targets=("token_embeddings",)))
            edit(folder, lambda values: values.pop("openelm_mlx"))
            if tied:
                message = refusal(model, folder)
                assert message.startswith(": mlx-lm trained an update of transformer.token_embeddings that changes the")
                assert "mlx_lm.fuse" in message
            else:
                attach_adapter(model, read_adapter(folder), folder)

    def test_whole_weights_are_no_adapter(self, model: OpenELM, folder: Path) -> None:
        edit(folder, lambda values: values.update(fine_tune_type="full"))
        assert "fine_tune_type is full: these are whole weights" in refusal(model, folder)


class TestFolders:
    def test_no_folder_or_a_file(self, model: OpenELM, folder: Path) -> None:
        assert refusal(model, folder / "x") == ": no such folder; an adapter is a folder"
        (folder / "x").touch()
        assert refusal(model, folder / "x") == ": is a file; an adapter is a folder"

    @pytest.mark.parametrize(
        ("file", "hint"),
        [
            ("adapter_model.safetensors", "it holds a PEFT adapter: openelm adapter import makes it ours"),
            ("config.json", "it holds a whole model: use it with --model"),
            ("checkpoints/step-000003/x", "it is a run that has not ended: openelm finetune --resume "),
        ],
    )
    def test_something_else(self, model: OpenELM, tmp_path: Path, file: str, hint: str) -> None:
        folder = tmp_path / "other"
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
        message = refusal(model, folder)
        assert message.startswith(": is no adapter: adapter_config.json and adapters.safetensors not there; ")
        assert hint in message

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
    def test_a_file_is_missing_or_no_regular_one(self, model: OpenELM, folder: Path, name: str) -> None:
        (folder / name).unlink()
        assert refusal(model, folder) == f": is no adapter: {name} not there"
        (folder / name).mkdir()
        assert f"/{name}: is no regular file" in refusal(model, folder)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"a": }'])
    def test_a_broken_config(self, model: OpenELM, folder: Path, content: str) -> None:
        (folder / "adapter_config.json").write_text(content)
        assert refusal(model, folder).startswith("/adapter_config.json: ")

    def test_broken_tensors(self, model: OpenELM, folder: Path) -> None:
        path = folder / "adapters.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
        assert "/adapters.safetensors: cut short: " in refusal(model, folder)
        path.write_bytes(b"")
        assert "/adapters.safetensors: no safetensors file" in refusal(model, folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda v: v.pop("lora_parameters"), "has no lora_parameters (rank, scale, dropout)"),
            (lambda v: v["lora_parameters"].pop("scale"), "describes no adapter: it has no 'scale'"),
            (lambda v: v.update(fine_tune_type="ia3"), "describes no adapter: method must be one of lora, dora"),
            (lambda v: v["openelm_mlx"].update(adapter=[]), "openelm_mlx.adapter must be an object, not []"),
            (lambda v: v.update(openelm_mlx=5), "openelm_mlx must be an object, not 5"),
            (
                lambda v: v["lora_parameters"].update(scale=9.5),
                "contradicts itself: scale is 9.5 for mlx-lm, and 4.0 under openelm_mlx",
            ),
            (lambda v: v.update(fine_tune_type="dora"), "contradicts itself: method is dora for mlx-lm, and lora"),
        ],
    )
    def test_a_config_that_cannot_be(
        self, model: OpenELM, folder: Path, change: Callable[[dict[str, Any]], object], message: str
    ) -> None:
        edit(folder, change)
        assert refusal(model, folder).startswith(f"/adapter_config.json: {message}")

    @pytest.mark.parametrize(
        ("key", "value", "wanted"),
        [
            ("rank", "4", "a whole number, 1 or more, not '4'"),
            ("rank", 10**400, "at most 1048576, not 1000"),
            ("scale", None, "a number above 0, not None"),
            ("scale", -1, "a number above 0, not -1"),
            ("scale", True, "a number above 0, not True"),
            ("scale", "x", "a number above 0, not 'x'"),
            ("scale", 10**400, "a number above 0, not 1000"),
            ("keys", [1], "a list of layers' names, not [1]"),
            ("keys", "qkv_proj", "a list of layers' names, not 'qkv_proj'"),
        ],
    )
    def test_parameters_that_cannot_be(
        self, model: OpenELM, folder: Path, key: str, value: object, wanted: str
    ) -> None:
        edit(folder, lambda v: v["lora_parameters"].update({key: value}))
        message = f"describes no adapter: lora_parameters.{key} must be {wanted}"
        assert refusal(model, folder).startswith(f"/adapter_config.json: {message}")

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("zzz", 1, " has an unknown key 'zzz'"),
            ("targets", None, ".targets must be a list of layers' names, not None"),
            ("rank", 0, ": rank must be a whole number, 1 or more, not 0"),
            ("alpha", 10**400, ": alpha must be a number above 0, not 1000"),
        ],
    )
    def test_own_settings_that_cannot_be(
        self, model: OpenELM, folder: Path, key: str, value: object, message: str
    ) -> None:
        edit(folder, lambda v: v["openelm_mlx"]["adapter"].update({key: value}))
        expected = f"/adapter_config.json: describes no adapter: openelm_mlx.adapter{message}"
        assert refusal(model, folder).startswith(expected)

    @pytest.mark.parametrize(
        ("key", "value", "wanted"),
        [
            ("num_transformer_layers", "x", "a whole number above 0, not 'x'"),
            ("model_dim", None, "a whole number above 0, not None"),
            ("vocab_size", True, "a whole number above 0, not True"),
            ("head_dim", 0, "a whole number above 0, not 0"),
            ("num_query_heads", 4, "a list of whole numbers above 0, not 4"),
            ("ffn_dims", [1, "2"], "a list of whole numbers above 0, not [1, '2']"),
            ("ffn_with_glu", 1, "true or false, not 1"),
        ],
    )
    def test_a_base_that_cannot_be(self, model: OpenELM, folder: Path, key: str, value: object, wanted: str) -> None:
        edit(folder, lambda v: v["openelm_mlx"]["base"].update({key: value}))
        assert refusal(model, folder) == f"/adapter_config.json: openelm_mlx.base.{key} must be {wanted}"

    def test_a_base_that_says_too_little(self, model: OpenELM, folder: Path) -> None:
        edit(folder, lambda v: v["openelm_mlx"].update(base={"model_dim": 128}))
        message = "openelm_mlx.base.num_transformer_layers must be a whole number above 0, and is not there"
        assert refusal(model, folder) == f"/adapter_config.json: {message}"
        edit(folder, lambda v: v["openelm_mlx"].update(base=[]))
        assert refusal(model, folder) == "/adapter_config.json: openelm_mlx.base must be an object, not []"

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_tensors_that_are_not_finite(self, model: OpenELM, folder: Path, value: float) -> None:
        name = f"{QKV}.lora_b"

        def damage(tensors: dict[str, mx.array]) -> None:
            tensors[name][1, 2] = value

        retensor(folder, damage)
        message = f"{name} has NaN or infinity in it, so the adapter is damaged"
        assert refusal(model, folder) == f"/adapters.safetensors: {message}"

    def test_no_tensors_or_strange_ones(self, model: OpenELM, folder: Path) -> None:
        retensor(folder, lambda t: t.update({f"{QKV}.weight": mx.zeros((3,))}))
        assert refusal(model, folder) == f"/adapters.safetensors: holds '{QKV}.weight', which is no part of an adapter"
        retensor(folder, lambda t: t.clear())
        assert refusal(model, folder) == "/adapters.safetensors: holds no tensors"


class TestFit:
    def test_another_architecture(self, folder: Path) -> None:
        message = refusal(golden_model("tiny-untied"), folder)
        assert message.startswith(": was trained on a model of another architecture: model_dim is 128, not 96; ")
        assert "num_transformer_layers is 4, not 3" in message
        assert "share_input_output_layers is True, not False" in message

    def test_another_rank(self, model: OpenELM, folder: Path) -> None:
        def rank_8(values: dict[str, Any]) -> None:
            values["lora_parameters"].update(rank=8)
            values["openelm_mlx"]["adapter"].update(rank=8, alpha=32)

        edit(folder, rank_8)
        message = refusal(model, folder)
        assert message.startswith(": its tensors do not fit the model and rank 8: wrong shape (32): ")
        assert f"{QKV}.lora_a is (128, 4), not (128, 8)" in message

    def test_missing_and_unexpected_ones(self, model: OpenELM, folder: Path) -> None:
        retensor(folder, lambda t: (t.pop(f"{QKV}.lora_b"), t.update({f"{QKV}.m": mx.zeros((3,))})))
        assert refusal(model, folder) == (
            f": its tensors do not fit the model and rank 4: missing (1): {QKV}.lora_b; unexpected (1): {QKV}.m"
        )

    @pytest.mark.parametrize("path", ["transformer.layers.9.ffn.proj_1", "transformer.norm", "lm_head"])
    def test_layers_that_are_not_there(self, model: OpenELM, folder: Path, path: str) -> None:
        retensor(folder, lambda t: t.update({f"{path}.lora_a": mx.zeros((128, 4))}))
        assert refusal(model, folder) == f": is for layers that the model does not have: {path}"

    def test_an_unfilled_model_will_do_for_the_check(self, folder: Path) -> None:
        check_fits(OpenELM(golden_config("tiny-tied")), read_adapter(folder), folder)
        with pytest.raises(AdapterError, match="another architecture"):
            check_fits(OpenELM(golden_config("tiny-untied")), read_adapter(folder), folder)

    @pytest.mark.parametrize("method", ["lora", "dora"])
    def test_on_a_packed_base(self, model: OpenELM, method: str) -> None:
        """Against the same model with its packed layers unpacked."""
        adapter = trained_adapter(model, method=method, targets=LINEARS_AND_EMBEDDING)
        nn.quantize(model, 32, 4)
        plain = golden_model("tiny-tied")
        packed = dict(model.named_modules())
        plain.load_weights(
            [
                (f"{p}.weight", mx.dequantize(q.weight, q.scales, q.biases, q.group_size, q.bits))
                for p, q in packed.items()
                if hasattr(q, "bits")
            ],
            strict=False,
        )
        for each in (model, plain):
            attach_adapter(each, adapter, "x")
        np.testing.assert_allclose(logits(model), logits(plain), atol=1e-4)


def test_a_note_where_the_precision_differs(model: OpenELM) -> None:
    adapter = trained_adapter(model, precision="bf16")
    assert precision_note(adapter, "bf16") is None
    assert precision_note(adapter, "4bit") == (
        "note: the adapter was trained on bf16 weights, and the model's are 4bit"
    )
    assert precision_note(replace(adapter, precision=None), "4bit") is None


def test_an_adapter_without_a_base_is_checked_by_shapes(model: OpenELM, tmp_path: Path) -> None:
    adapter = replace(trained_adapter(model), base=None)
    folder = saved(tmp_path / "a", adapter)
    assert json.loads((folder / "adapter_config.json").read_text())["num_layers"] == -1
    assert "is for layers that the model does not have" in refusal(golden_model("tiny-untied"), folder)
    attach_adapter(model, read_adapter(folder), folder)


def test_the_last_position_alone(model: OpenELM, folder: Path) -> None:
    attach_adapter(model, read_adapter(folder), folder)
    last = model(mx.array([IDS]), logits_to_keep=1)[0]
    np.testing.assert_allclose(array(last), logits(model)[-1:], atol=1e-5)
