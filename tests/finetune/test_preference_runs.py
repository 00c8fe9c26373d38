"""Runs on preferences as a person makes them: what they leave, stop and go on as, and refuse."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.finetune import job
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.trainer import Stopped
from tests.finetune.runs import Line, listing, metrics, refused, started, updates, wait_for
from tests.finetune.test_trainer import Signals, Told
from tests.support.cli import run

FIGURES = ["rewards_chosen", "rewards_rejected", "margin", "accuracy", "logps_chosen", "logps_rejected"]
NEEDED = "preferences need prompt, chosen and rejected (--objective dpo)"
BEFORE = "computing the responses' log-probabilities before training, once"


def write_pairs(path: Path, count: int = 12) -> Path:
    """Preferences, all different: rabbits before books."""
    words = ("Alice", "was", "reading", "about", "the", "white", "once", "upon", "time")
    prompts = [" ".join(words[(n * 2 + k) % len(words)] for k in range(2 + n % 4)) + f" {n}:" for n in range(count)]
    rows = [
        {"prompt": p, "chosen": " the rabbit" + " once" * (n % 3) + ".", "rejected": " a book" + " was" * (n % 2)}
        for n, p in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "my.jsonl")


def arguments(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    small = ["--max-length=40", "--batch-size=2", "--rank=2", "--learning-rate=0.003", "--valid-fraction=0.25"]
    given = ["finetune", "--model", str(model), "--data", str(data), "--out", str(out), "--objective=dpo"]
    return [*given, *small, "--eval-every=3", "--no-plot", "--quiet", *more]


def settings(model: Path, data: Path, **values: Any) -> Settings:
    usual: dict[str, Any] = {"steps": 6, "eval_every": 3, "save_every": 2, "learning_rate": 3e-3, "rank": 2}
    if values.get("method") == "full":
        del usual["rank"]
    where = {"model": str(model), "data": str(data), "plot": False}
    return Settings(
        **{**where, **usual, "objective": "dpo", "max_length": 40, "batch_size": 2, "valid_fraction": 0.25, **values}
    )


@pytest.fixture(scope="module")
def out(model: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dpo") / "run"
    given = [a for a in arguments(model, pairs, out, "--steps=6", "--test", str(pairs)) if a != "--quiet"]
    done = run(*given, "--plot")
    assert done.status == 0, done.err
    assert done.err.count(BEFORE) == 1
    assert re.search(r"step 6  validation loss \d\.\d+, accuracy \d+\.\d%, margin -?\d\.\d+\n", done.err)
    assert re.search(r"step 6/6  loss 0\.\d+  accuracy \d+%  ", done.err)
    assert re.search(r"\ntest loss \d\.\d{4}, accuracy \d+\.\d%\ntry it: ", done.out)
    return out


def figures_of(model: Path, pairs: Path, folder: Path, **changed: Any) -> list[Line]:
    job.finetune(settings(model, pairs, **{"steps": 2, "eval_every": 2, **changed}), folder / "run")
    return metrics(folder / "run")


@pytest.fixture(scope="module")
def usual(model: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    return figures_of(model, pairs, tmp_path_factory.mktemp("usual"))


class TestARun:
    def test_what_it_leaves(self, out: Path) -> None:
        assert {"adapters.safetensors", "reference.safetensors", "loss.png", "metrics.jsonl"} < set(listing(out))
        done = run("finetune", "--recipe", out / "config.yaml", "--out", out, "--force", "--dry-run")
        assert done.status == 0, done.err

    def test_metrics(self, out: Path) -> None:
        lines = metrics(out)
        training = updates(lines)
        assert [list(line)[2:9] for line in training] == [["loss", *FIGURES]] * 6
        assert all(
            line["margin"] == pytest.approx(line["rewards_chosen"] - line["rewards_rejected"]) for line in training
        )
        assert training[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: nothing has moved yet
        validations = [line for line in lines if "valid_loss" in line]
        names = [f"valid_{name}" for name in ("loss", *FIGURES, "pairs")]
        assert [list(line) for line in validations] == [["step", *names]] * 3
        assert validations[0]["valid_margin"] == pytest.approx(0, abs=1e-4)
        assert validations[-1]["valid_margin"] > 0.05
        assert validations[-1]["valid_accuracy"] == 1
        assert (validations[0]["valid_pairs"], lines[-1]["test_pairs"]) == (3, 12)
        assert lines[-1]["test_accuracy"] > 0.9

    def test_rewards_are_beta_times_what_changed(self, out: Path) -> None:
        first, last = (
            [line for line in metrics(out) if "valid_loss" in line][n] for n in (0, -1)
        )  # at first the model is the reference
        for name in ("chosen", "rejected"):
            change = last[f"valid_logps_{name}"] - first[f"valid_logps_{name}"]
            assert last[f"valid_rewards_{name}"] == pytest.approx(0.1 * change, abs=1e-4)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_stopped_it_goes_on_the_same(method: str, model: Path, pairs: Path, tmp_path: Path) -> None:
    """A resumed run's reference is the model before training, not as it was stopped, and is not computed again."""
    chosen = settings(model, pairs, method=method)
    job.finetune(chosen, tmp_path / "whole")
    with pytest.raises(Stopped):
        job.finetune(chosen, tmp_path / "run", watcher=Signals(update=3))
    told = Told()
    job.resume(tmp_path / "run", watcher=told)
    assert told.steps == [4, 5, 6]
    assert BEFORE not in told.said
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


class TestWhatIsKeptOfTheModelBefore:
    @pytest.mark.slow
    @pytest.mark.parametrize("damage", ["missing", "a bit"])
    def test_a_resumed_run_computes_it_again_from_the_base(
        self, damage: str, model: Path, pairs: Path, tmp_path: Path
    ) -> None:
        chosen = settings(model, pairs, method="dora")
        job.finetune(chosen, tmp_path / "whole")
        with pytest.raises(Stopped):
            job.finetune(chosen, tmp_path / "run", watcher=Signals(update=4))
        path = tmp_path / "run" / "reference.safetensors"
        before, data = path.read_bytes(), bytearray(path.read_bytes())
        data[-3] ^= 1
        path.unlink() if damage == "missing" else path.write_bytes(bytes(data))
        told = Told()
        job.resume(tmp_path / "run", watcher=told)
        assert (f"note: {path}: damaged, or of another model: computed again" in told.said) == (damage == "a bit")
        assert BEFORE in told.said
        assert path.read_bytes() == before
        assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")

    @pytest.mark.slow
    def test_more_to_validate_on_is_computed_from_the_model_before(
        self, model: Path, pairs: Path, tmp_path: Path
    ) -> None:
        """With all weights trained, the model on the disk is still the one before."""
        chosen = settings(model, pairs, method="full", eval_batches=1, batch_size=1, valid_fraction=0.3)
        with pytest.raises(Stopped):
            job.finetune(chosen, tmp_path / "run", watcher=Signals(update=4))
        told = Told()
        job.resume(tmp_path / "run", changes={"eval_batches": 0}, watcher=told)
        assert BEFORE in told.said
        (last,) = [line for line in metrics(tmp_path / "run") if "valid_loss" in line and line["step"] == 6]
        every = settings(model, pairs, method="full", batch_size=1, valid_fraction=0.3)
        job.finetune(every, tmp_path / "whole")
        assert metrics(tmp_path / "whole")[-1] == last
        assert last["valid_pairs"] == 3


@pytest.mark.slow
def test_killed_while_it_is_computed_and_after_it_ends_the_same(model: Path, pairs: Path, tmp_path: Path) -> None:
    many = write_pairs(tmp_path / "many.jsonl", 60)
    given = [*arguments(model, many, tmp_path / "run", "--steps=8", "--save-every=2")]
    assert run(*arguments(model, many, tmp_path / "whole", "--steps=8", "--save-every=2")).status == 0
    out = tmp_path / "run"
    with started(*given) as process:
        wait_for(out, 0)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    resume = ["finetune", "--resume", str(out), "--quiet"]
    with started(*resume) as process:
        wait_for(out, 6)
        process.kill()
        process.wait()
    assert run(*resume).status == 0
    assert metrics(out) == metrics(tmp_path / "whole")
    assert listing(out) == listing(tmp_path / "whole")
    for name in ("reference.safetensors", "adapters.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


class TestSettings:
    @pytest.mark.parametrize(
        "changed",
        [
            {"dpo_loss": "hinge"},
            {"beta": 0.3},
            {"max_prompt": 3},
            {"warmup_ratio": 1.0},
            {"max_length": 14},
            {"seed": 1},
            {"accumulation": 2},
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_each_does_something(
        self, changed: dict[str, Any], usual: list[Line], model: Path, pairs: Path, tmp_path: Path
    ) -> None:
        assert figures_of(model, pairs, tmp_path, **changed) != usual

    def test_batches_are_of_pairs(self, usual: Sequence[Line], model: Path, pairs: Path, tmp_path: Path) -> None:
        larger = figures_of(model, pairs, tmp_path, batch_size=9)
        assert updates(larger)[0]["epoch"] == 0
        assert updates(larger)[1]["epoch"] == 1


MALFORMED: list[tuple[Any, str]] = [
    ({"prompt": "a", "chosen": "b"}, f"has no 'rejected'; {NEEDED}"),
    ({"prompt": "a", "completion": "b"}, f"has no 'chosen'; {NEEDED}"),
    ({"chosen": "a", "rejected": "b"}, f"has no 'prompt'; {NEEDED}"),
    ({"prompt": "a", "chosen": 1, "rejected": "b"}, "'chosen' and 'rejected' must be both text or both lists of "),
    ({"prompt": "a", "chosen": [], "rejected": []}, "'chosen': there are no messages"),
    (3, "a JSON object is needed, not a number"),
]


class TestRefusals:
    @pytest.mark.parametrize(("values", "message"), MALFORMED)
    def test_malformed_pairs(self, values: Any, message: str, model: Path, tmp_path: Path) -> None:
        path = tmp_path / "my.jsonl"
        path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n" + json.dumps(values) + "\n")
        said = refused(*arguments(model, path, tmp_path / "run"), out=tmp_path / "run")
        assert said.startswith(f"{path}:2: {message}")
        assert said.endswith("; --skip-bad-lines counts such lines instead")

    def test_messages_need_a_template(self, model: Path, tmp_path: Path) -> None:
        path = tmp_path / "my.jsonl"
        turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in "bc"]
        path.write_text(json.dumps({"chosen": turns[0], "rejected": turns[1]}))
        said = refused(*arguments(model, path, tmp_path / "run"), out=tmp_path / "run")
        assert said.startswith(f"{path}:1: messages need a chat template, and the model has none")

    def test_preferences_without_the_objective_name_it(self, model: Path, pairs: Path, tmp_path: Path) -> None:
        given = [a for a in arguments(model, pairs, tmp_path / "run") if a != "--objective=dpo"]
        said = refused(*given, out=tmp_path / "run")
        assert said.startswith(f"{pairs}:1: is a preference, 'chosen' and 'rejected'; --objective dpo learns those")

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (["--packing=on"], "packing on: the responses of preferences lie in rows of their own"),
            (["--train-on-prompt"], "train_on_prompt: means nothing with --objective dpo: leave it out"),
            (["--z-loss=0.1"], "z_loss: means nothing with --objective dpo: leave it out"),
            (["--objective=next-token", "--beta=0.2"], "beta: of preferences: --objective dpo"),
            (["--beta=0"], "beta must be above 0, not 0.0"),
        ],
    )
    def test_options(self, given: list[str], message: str, model: Path, pairs: Path, tmp_path: Path) -> None:
        assert refused(*arguments(model, pairs, tmp_path / "run", *given), out=tmp_path / "run") == message


def test_a_dry_run_shows_both_rows_and_the_memory_of_both(model: Path, pairs: Path) -> None:
    given = ["finetune", "--model", str(model), "--data", str(pairs), "--objective=dpo", "--valid-fraction=0"]
    one, many = (run(*given, f"--batch-size={n}", "--dry-run") for n in (1, 4))
    assert one.status == 0, one.err
    assert "pairs     1, a row for each response: one chosen, one rejected\n" in one.out
    assert re.findall(r"row \d, .*:(\d+) \((\w+)\)", one.out)[0][1] == "chosen"
    assert [kind for _, kind in re.findall(r"row \d, .*:(\d+) \((\w+)\)", many.out)] == ["chosen", "rejected"] * 4
    assert "updates     36\n" in one.out
    assert one.err.startswith("train: 12 pairs, ")
