"""What is kept of the model before training: computed once, and never taken for another model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from openelm_mlx.finetune.preferences import row_keys
from openelm_mlx.finetune.reference import reference_of
from openelm_mlx.finetune.run_folder import RunFolder
from openelm_mlx.finetune.step import written_out
from tests.finetune.made import model_of
from tests.finetune.test_preferences import logps, pairs_of, rows
from tests.finetune.test_trainer import Told
from tests.support.models import golden_model

CASE = "tiny-no-glu"
SUBJECT = {"model": {"model.safetensors": {"bytes": 3, "sha256": "00"}}, "dtype": "float32"}
BEFORE = "computing the responses' log-probabilities before training, once"


def reference(folder: Path, told: Told, subject: dict[str, Any] = SUBJECT, parts: int = 3) -> dict[bytes, float]:
    """By a model whose adapters change what it says."""
    made, model = rows(), model_of(CASE)
    batches = [pairs_of(made[n : n + 2]) for n in range(0, 2 * parts, 2)]
    return reference_of(model, batches, parts, RunFolder(folder), subject, told, on_cpu=written_out(model))


def test_it_is_what_the_base_says(tmp_path: Path) -> None:
    told = Told()
    found = reference(tmp_path, told)
    made = rows()
    expected: Any = logps(golden_model(CASE), made).tolist()
    assert [found[key] for key in row_keys(pairs_of(made))] == pytest.approx(expected, rel=1e-5)
    assert told.said == [BEFORE]
    assert told.evaluated[-1] == (3, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["reference.safetensors"]


def test_what_is_there_is_taken_and_what_is_missing_added(tmp_path: Path) -> None:
    some, again, rest = Told(), Told(), Told()
    first = reference(tmp_path, some, parts=2)
    kept = (tmp_path / "reference.safetensors").read_bytes()
    assert reference(tmp_path, again, parts=2) == first
    assert (again.said, again.evaluated) == ([], [])
    assert (tmp_path / "reference.safetensors").read_bytes() == kept
    more = reference(tmp_path, rest)
    assert rest.said == [BEFORE]
    assert len(more) == 6
    assert first.items() < more.items()


@pytest.mark.parametrize("damage", ["a bit", "cut short", "a value", "no tensors", "empty", "the model", "the dtype"])
def test_what_is_not_right_is_said_and_computed_again(damage: str, tmp_path: Path) -> None:
    expected, path, subject = reference(tmp_path, Told()), tmp_path / "reference.safetensors", SUBJECT
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[-3] ^= 1
        path.write_bytes(bytes(data))
    elif damage == "cut short":
        path.write_bytes(bytes(data[:-9]))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "a value":
        values: Any = mx.load(str(path))
        mx.save_safetensors(str(path), {**values, "logps": values["logps"] + 1})
    elif damage == "no tensors":
        mx.save_safetensors(str(path), {"empty": mx.zeros(1)})
    elif damage == "the model":
        subject = {**SUBJECT, "model": {"model.safetensors": {"bytes": 3, "sha256": "01"}}}
    else:
        subject = {**SUBJECT, "dtype": "bfloat16"}
    told = Told()
    assert reference(tmp_path, told, subject) == expected
    assert told.said == [f"note: {path}: damaged, or of another model: computed again", BEFORE]
    again = Told()
    reference(tmp_path, again, subject)
    assert again.said == []


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(Told):
        def validating(self, done: int, total: int) -> None:
            if done == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reference(tmp_path, Interrupted())
    assert list(tmp_path.iterdir()) == []
