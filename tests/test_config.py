"""OpenELMConfig: every dialect gives the same sizes, and what cannot be is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from openelm_mlx.config import PRESETS, OpenELMConfig
from openelm_mlx.errors import ConfigError
from tests.golden.checkpoints import BUNDLED, weights_module

GOLDEN = json.loads((BUNDLED / "layer_wise_scaling.json").read_text())
PRESET_CASES = {
    "OpenELM-270M": "openelm-270m",
    "OpenELM-450M": "openelm-450m",
    "OpenELM-1_1B": "openelm-1.1b",
    "OpenELM-3B": "openelm-3b",
}
RANGES: dict[str, Any] = {
    "model_type": "openelm",
    "vocab_size": 512,
    "num_transformer_layers": 4,
    "model_dim": 128,
    "head_dim": 32,
    "num_gqa_groups": 2,
    "qkv_multipliers": [0.5, 1.0],
    "ffn_multipliers": [0.5, 4.0],
    "ffn_dim_divisor": 32,
}
HEADS: dict[str, Any] = {
    **{k: v for k, v in RANGES.items() if k not in ("qkv_multipliers", "num_gqa_groups")},
    "num_query_heads": [2, 4, 4, 4],
    "num_kv_heads": [1, 2, 2, 2],
    "ffn_multipliers": [0.5, 1.67, 2.83, 4.0],
}


def read(**changes: Any) -> OpenELMConfig:
    values = {k: v for k, v in {**RANGES, **changes}.items() if v != "absent"}
    return OpenELMConfig.from_dict(values)


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as e:
        read(**changes)
    return str(e.value)


class TestDialects:
    def test_ranges_and_lists_give_the_same_sizes(self) -> None:
        ranges, lists = read(), OpenELMConfig.from_dict(HEADS)
        for key in ("num_query_heads", "num_kv_heads", "ffn_multipliers", "ffn_dims"):
            assert getattr(ranges, key) == getattr(lists, key)
        assert ranges.num_query_heads == (2, 4, 4, 4)

    def test_both_at_once_when_they_agree(self) -> None:
        assert OpenELMConfig.from_dict({**RANGES, **HEADS}).num_query_heads == (2, 4, 4, 4)

    def test_query_heads_that_disagree_name_the_layer(self) -> None:
        message = refused(num_query_heads=[2, 4, 2, 4])
        assert message == "layer 2: num_query_heads says 2, but qkv_multipliers gives 4"

    def test_kv_heads_that_disagree_name_the_layer(self) -> None:
        message = refused(num_kv_heads=[1, 1, 2, 2])
        assert message == "layer 1: num_kv_heads says 1, but num_gqa_groups gives 2"

    def test_expanded_qkv_multipliers(self) -> None:
        assert read(qkv_multipliers=[0.5, 0.67, 0.83, 1.0]).num_query_heads == read().num_query_heads

    def test_one_multiplier_for_all_layers(self) -> None:
        config = read(qkv_multipliers=1.0, ffn_multipliers=2.0)
        assert config.num_query_heads == (4,) * 4
        assert config.ffn_dims == (256,) * 4

    def test_one_number_of_heads_for_all_layers(self) -> None:
        config = OpenELMConfig.from_dict({**HEADS, "num_query_heads": 4, "num_kv_heads": 2})
        assert (config.num_query_heads, config.num_kv_heads) == ((4,) * 4, (2,) * 4)

    def test_two_layers_with_expanded_lists(self) -> None:
        changes: dict[str, Any] = {"num_transformer_layers": 2, "num_query_heads": [2, 4], "num_kv_heads": [1, 2]}
        config = OpenELMConfig.from_dict({**HEADS, **changes, "ffn_multipliers": [0.5, 4.0]})
        assert config.ffn_multipliers == (0.5, 4.0)
        assert config.ffn_dims == (64, 512)

    def test_two_entries_for_two_layers_are_rounded_like_any_range(self) -> None:
        # configuration_openelm.py and GPTConfig look at the length first: two entries are the range.
        config = read(num_transformer_layers=2, ffn_multipliers=[0.504, 3.996])
        assert config.ffn_multipliers == (0.5, 4.0)

    def test_one_number_for_two_layers_stays_what_it_is(self) -> None:
        config = read(num_transformer_layers=2, ffn_multipliers=1.875)
        assert OpenELMConfig.from_dict(config.to_dict()).ffn_multipliers == (1.875, 1.875)

    def test_groups_default_to_one(self) -> None:
        config = read(num_gqa_groups="absent")
        assert config.num_kv_heads == config.num_query_heads

    def test_groups_are_read_off_the_heads(self) -> None:
        config = read(num_gqa_groups="absent", num_query_heads=[2, 4, 4, 4], num_kv_heads=[1, 2, 2, 2])
        assert config.num_kv_heads == (1, 2, 2, 2)

    def test_uneven_groups_are_possible_with_lists_alone(self) -> None:
        config = OpenELMConfig.from_dict({**HEADS, "num_kv_heads": [2, 1, 4, 2]})
        assert config.num_kv_heads == (2, 1, 4, 2)

    def test_unknown_keys_and_nulls_are_left_alone(self) -> None:
        assert read(auto_map={"x": 1}, num_kv_heads=None, use_cache=True) == read()

    def test_hugging_face_defaults(self) -> None:
        config = read()
        assert (config.rms_norm_eps, config.rope_freq_constant, config.max_context_length) == (1e-6, 10000, 2048)
        assert (config.ffn_with_glu, config.normalize_qk_projections, config.share_input_output_layers) == (
            True,
            False,
            False,
        )


class TestPresets:
    @pytest.mark.parametrize(("name", "case"), PRESET_CASES.items())
    def test_sizes(self, name: str, case: str) -> None:
        config, sizes = OpenELMConfig.preset(name), GOLDEN[case]
        assert list(config.num_query_heads) == sizes["num_query_heads"]
        assert list(config.num_kv_heads) == sizes["num_kv_heads"]
        assert list(config.ffn_dims) == sizes["ffn_dims"]
        known = weights_module(BUNDLED).CASES[case]
        for key in ("model_dim", "head_dim", "vocab_size", "normalize_qk_projections", "share_input_output_layers"):
            assert getattr(config, key) == known[key]

    def test_use_does_not_change_them(self) -> None:
        before = {name: dict(values) for name, values in PRESETS.items()}
        for name in PRESETS:
            config = OpenELMConfig.preset(name, vocab_size=32128, max_context_length=64)
            config.to_dict()["num_query_heads"].append(7)
        assert {name: dict(values) for name, values in PRESETS.items()} == before
        assert OpenELMConfig.preset("OpenELM-270M").vocab_size == 32000
        with pytest.raises(TypeError):
            PRESETS["OpenELM-270M"]["model_dim"] = 1  # type: ignore[index]

    def test_recognised_whatever_the_vocabulary(self) -> None:
        for name in PRESETS:
            assert OpenELMConfig.preset(name, vocab_size=32128).preset_name == name
            read_back = OpenELMConfig.from_dict(OpenELMConfig.preset(name).to_dict())
            assert read_back.preset_name == name
        assert read().preset_name is None
        assert OpenELMConfig.preset("OpenELM-270M", ffn_with_glu=False).preset_name is None

    def test_an_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match="no preset named 'OpenELM-7B'; there are OpenELM-270M"):
            OpenELMConfig.preset("OpenELM-7B")


class TestRoundTrip:
    @pytest.mark.parametrize("case", GOLDEN)
    def test_golden_cases_through_json(self, case: str) -> None:
        module = weights_module(BUNDLED)
        config = OpenELMConfig.from_dict({**module.COMMON, **module.CASES[case]})
        assert OpenELMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    @settings(max_examples=200)
    @given(st.data())
    def test_any_config_through_json(self, data: st.DataObject) -> None:
        number, layers = st.floats(0.1, 8, allow_nan=False), data.draw(st.integers(1, 6))
        multipliers = number | st.tuples(number, number) | st.tuples(*[number] * layers)
        groups = data.draw(st.integers(1, 4))
        try:
            config = OpenELMConfig(
                model_dim=data.draw(st.integers(1, 512)),
                num_transformer_layers=layers,
                head_dim=2 * data.draw(st.integers(1, 64)),
                num_gqa_groups=groups,
                qkv_multipliers=data.draw(multipliers),
                ffn_multipliers=data.draw(multipliers),
                ffn_dim_divisor=data.draw(st.integers(1, 300)),
                ffn_with_glu=data.draw(st.booleans()),
                eos_token_id=data.draw(st.none() | st.integers(0, 9) | st.tuples(st.integers(0, 9), st.integers(0, 9))),
                bos_token_id=data.draw(st.integers(0, 9)),
            )
        except ConfigError:
            assume(False)
        back = OpenELMConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        # Null is how the format leaves a key out, so "no EOS" comes back as the default.
        assert dataclasses.replace(back, eos_token_id=config.eos_token_id) == config
        assert all(h % groups == 0 for h in config.num_query_heads)

    def test_lists_have_one_entry_a_layer(self) -> None:
        values = read(ffn_multipliers=2.0).to_dict()
        for key in ("num_query_heads", "num_kv_heads", "ffn_multipliers"):
            assert isinstance(values[key], list)
            assert len(values[key]) == 4
        assert values["model_type"] == "openelm"

    def test_a_single_field_can_be_replaced(self) -> None:
        other = dataclasses.replace(read(), vocab_size=7)
        assert other.vocab_size == 7
        assert dataclasses.replace(other, vocab_size=512) == read()


class TestImmutable:
    def test_fields(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            read().model_dim = 1  # type: ignore[misc]

    def test_the_lists_it_was_made_of_are_copied(self) -> None:
        values = copy.deepcopy({**HEADS, "eos_token_id": [2, 3], "qkv_multipliers": [0.5, 1.0], "num_gqa_groups": 2})
        config = OpenELMConfig.from_dict(values)
        for value in values.values():
            if isinstance(value, list):
                value.append(99)
        assert config.num_query_heads == (2, 4, 4, 4)
        assert config.ffn_multipliers == (0.5, 1.67, 2.83, 4.0)
        assert config.eos_token_ids == (2, 3)
        assert config.qkv_multipliers == (0.5, 1.0)
        hash(config)

    def test_what_it_hands_out_is_a_copy(self) -> None:
        config = read()
        config.to_dict()["ffn_multipliers"].clear()
        assert len(config.ffn_dims) == 4


def test_eos_ids() -> None:
    assert read().eos_token_ids == (2,)
    assert read(eos_token_id=[2, 32000]).eos_token_ids == (2, 32000)
    assert dataclasses.replace(read(), eos_token_id=None).eos_token_ids == ()


class TestRefusals:
    @pytest.mark.parametrize("key", ["vocab_size", "num_transformer_layers", "model_dim", "head_dim"])
    def test_missing_keys_are_named(self, key: str) -> None:
        assert refused(**{key: "absent"}) == f"the config has no {key}"
        assert refused(**{key: None}) == f"the config has no {key}"

    def test_all_missing_keys_are_named(self) -> None:
        with pytest.raises(ConfigError, match="no vocab_size, num_transformer_layers, model_dim, head_dim"):
            OpenELMConfig.from_dict({})

    def test_another_kind_of_model(self) -> None:
        assert "model_type is 'llama', not 'openelm'" in refused(model_type="llama")
        with pytest.raises(ConfigError, match="'llama'"):
            OpenELMConfig.from_dict({"model_type": "llama", "hidden_size": 4096})

    @pytest.mark.parametrize(
        "key",
        [
            "vocab_size",
            "num_transformer_layers",
            "model_dim",
            "head_dim",
            "max_context_length",
            "ffn_dim_divisor",
            "rope_max_length",
            "num_gqa_groups",
        ],
    )
    @pytest.mark.parametrize("value", [0, -1, True, "4", 2.5, [4], float("nan")])
    def test_sizes_are_positive_whole_numbers(self, key: str, value: object) -> None:
        assert refused(**{key: value}) == f"{key} must be a positive whole number, not {value!r}"

    @pytest.mark.parametrize("key", ["rope_freq_constant", "rms_norm_eps"])
    @pytest.mark.parametrize("value", [0, -1.0, True, "1e-6", [1], float("nan"), float("inf")])
    def test_reals_are_positive_and_finite(self, key: str, value: object) -> None:
        assert refused(**{key: value}) == f"{key} must be a positive number, not {value!r}"

    @pytest.mark.parametrize("key", ["ffn_with_glu", "normalize_qk_projections", "share_input_output_layers"])
    @pytest.mark.parametrize("value", [0, 1, "true", []])
    def test_flags_are_true_or_false(self, key: str, value: object) -> None:
        assert refused(**{key: value}) == f"{key} must be true or false, not {value!r}"

    def test_names(self) -> None:
        assert "activation 'gelu' is not known; known: swish, silu" in refused(activation_fn_name="gelu")
        assert "norm 'layer_norm' is not known; known: rms_norm" in refused(normalization_layer_name="layer_norm")
        assert read(activation_fn_name="silu").activation_fn_name == "silu"

    @pytest.mark.parametrize("key", ["qkv_multipliers", "ffn_multipliers"])
    def test_multipliers(self, key: str) -> None:
        assert refused(**{key: [0.5, 0.6, 0.7]}).startswith(f"{key} has 3 entries; a range of 2 or one for each of 4")
        assert refused(**{key: []}).startswith(f"{key} has 0 entries")
        for bad in (0, -1, True, "2", [0.5, 0], [0.5, "1"], [True, 1.0], float("nan"), float("inf"), [[1, 2]]):
            assert refused(**{key: bad}).startswith(f"{key} must be positive numbers")

    @pytest.mark.parametrize("key", ["num_query_heads", "num_kv_heads"])
    def test_heads(self, key: str) -> None:
        assert refused(**{key: [4] * 5}) == f"{key} has 5 entries for 4 layers"
        for bad in (0, -2, True, "4", 1.5):
            message = refused(**{key: [4, 4, bad, 4]})
            assert message == f"{key}, layer 2, must be a positive whole number, not {bad!r}"
        assert "must be a list" in refused(**{key: "4444"})

    def test_heads_of_a_wrong_kind_in_python(self) -> None:
        with pytest.raises(ConfigError, match="num_query_heads must be a list with one entry a layer, not 4"):
            OpenELMConfig(model_dim=8, num_transformer_layers=1, head_dim=2, num_query_heads=4, num_kv_heads=(1,))  # type: ignore[arg-type]

    def test_kv_heads_that_do_not_divide(self) -> None:
        with pytest.raises(ConfigError, match="layer 1: 4 query heads cannot share 3 key-value heads evenly"):
            OpenELMConfig.from_dict({**HEADS, "num_kv_heads": [1, 3, 2, 2]})

    def test_groups_that_do_not_divide(self) -> None:
        with pytest.raises(ConfigError, match="layer 0: 2 query heads are no multiple of num_gqa_groups 4"):
            OpenELMConfig.from_dict({**HEADS, "num_gqa_groups": 4})

    def test_no_heads_at_all(self) -> None:
        assert refused(qkv_multipliers="absent") == "neither num_query_heads nor qkv_multipliers is given"
        with pytest.raises(ConfigError, match="neither num_kv_heads nor num_gqa_groups is given"):
            OpenELMConfig(model_dim=8, num_transformer_layers=1, head_dim=2, num_query_heads=(4,))

    def test_an_odd_head_width(self) -> None:
        assert refused(head_dim=33) == "head_dim must be even for RoPE, not 33"

    @pytest.mark.parametrize("value", [-1, True, "2", 1.5, [2, "3"], [[2]]])
    def test_token_ids(self, value: object) -> None:
        assert "eos_token_id must be a token id" in refused(eos_token_id=value)
        if not isinstance(value, list):
            assert "bos_token_id must be a token id" in refused(bos_token_id=value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10**12}, "vocab_size must be at most"),
        ({"num_transformer_layers": 10**9}, "num_transformer_layers must be at most 4,096"),
        ({"model_dim": 10**25}, "model_dim must be at most"),
        ({"ffn_dim_divisor": 10**18}, "ffn_dim_divisor must be at most"),
        ({"ffn_multipliers": 9e5}, "layer 0: the feed-forward network would be"),
        ({"qkv_multipliers": 9e5}, "layer 0: the heads would be"),
        ({"rope_freq_constant": 10**50}, "rope_freq_constant must be a positive number"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_made_of_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenELMConfig.preset("OpenELM-270M", **changes)


def test_a_list_is_no_config() -> None:
    with pytest.raises(ConfigError, match="a config is an object"):
        OpenELMConfig.from_dict([1])  # type: ignore[arg-type]
