"""What the model before training says of the responses: computed once, and kept in the run's folder.

So there is no second model: adapters are switched off while it is computed, and where all weights are trained they are
the initial ones then. The figures are kept by the tokens themselves, see `row_keys`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from openelm_mlx.adapters import switched_off
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.types import Batch
from openelm_mlx.finetune.losses import Arrays, evaluated_states
from openelm_mlx.finetune.preferences import KEY_BYTES, response_logps, row_keys
from openelm_mlx.finetune.run_folder import REFERENCE, RunFolder
from openelm_mlx.finetune.watching import Watcher
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors

Known = dict[bytes, float]


def reference_of(
    model: OpenELM,
    batches: Iterable[Batch],
    total: int,
    folder: RunFolder,
    subject: Mapping[str, Any],
    watcher: Watcher,
    *,
    on_cpu: bool,
) -> Known:
    """The log-probabilities of the responses in all rows of the batches, by their keys: those kept, the rest computed.

    Args:
        model: as it was before training, but for its adapters.
        batches: with all rows that will be asked for.
        total: how many batches there are.
        folder: the run's, in which they are kept.
        subject: plain values of what they depend on besides the tokens: the model's files and the dtype.
        watcher: told how far it is, and of what is kept but cannot be used.
        on_cpu: whether it is a float32 model on a CPU.

    Raises:
        RunError: they cannot be written.
    """
    known = _kept(folder, subject, watcher)
    had = len(known)
    model.eval()
    with switched_off(model):
        for done, batch in enumerate(batches, 1):
            keys = row_keys(batch)
            if known.keys() >= set(keys):
                continue
            if len(known) == had:
                watcher.say("computing the responses' log-probabilities before training, once")
            known.update(zip(keys, _logps(model, batch, on_cpu=on_cpu), strict=True))
            watcher.validating(done, total)
    if len(known) > had:
        folder.save_reference(_tensors(known, subject))
        watcher.validating(total, total)
    return known


def _logps(model: OpenELM, batch: Batch, *, on_cpu: bool) -> list[float]:
    arrays = Arrays.of(batch, fill_up=not on_cpu)
    hidden = evaluated_states(model, arrays, on_cpu=on_cpu)
    found: Any = response_logps(model, hidden, arrays, mx.eval).tolist()
    return list(found)


def _kept(folder: RunFolder, subject: Mapping[str, Any], watcher: Watcher) -> Known:
    """What is in the run's folder; nothing, and a word about it, if it is damaged or of another model."""
    try:
        tensors = folder.reference()
        if tensors is None:
            return {}
        keys, logps, digest = (np.array(tensors[name]) for name in ("keys", "logps", "sha256"))
        if digest.tobytes() == _digest(keys.tobytes(), logps.tobytes(), subject):
            return dict(zip(map(bytes, keys.reshape(-1, KEY_BYTES)), logps.tolist(), strict=True))
    except (OpenELMError, KeyError, ValueError):
        pass
    watcher.say(f"note: {folder.path / REFERENCE}: damaged, or of another model: computed again")
    return {}


def _tensors(known: Known, subject: Mapping[str, Any]) -> Tensors:
    keys = np.frombuffer(b"".join(known), np.uint8).reshape(-1, KEY_BYTES)
    logps = np.fromiter(known.values(), np.float32)
    digest = np.frombuffer(_digest(keys.tobytes(), logps.tobytes(), subject), np.uint8)
    return {"keys": mx.array(keys), "logps": mx.array(logps), "sha256": mx.array(digest)}


def _digest(keys: bytes, logps: bytes, subject: Mapping[str, Any]) -> bytes:
    told = json.dumps(subject, sort_keys=True).encode()
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (told, keys, logps))).digest()
