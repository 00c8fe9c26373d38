"""PyTorch's ``.pt`` and ``.bin`` files as plain data: without torch, lazily, and without running anything in them.

``torch.save`` writes a zip: ``<prefix>/data.pkl`` is a pickle of the object, in which a tensor is a call of
``torch._utils._rebuild_tensor_v2`` on a reference to a storage; ``<prefix>/data/<key>`` holds that storage's bytes,
uncompressed. (Format: torch/serialization.py, caffe2/serialize/inline_container.h.)

The pickle is read by ``torchpickle``, which knows the opcodes and names of data and refuses all others.
"""

from __future__ import annotations

import bisect
import os
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO, NoReturn

from openelm_mlx.errors import CheckpointError
from openelm_mlx.rawtensor import RawTensor
from openelm_mlx.torchpickle import command_name, load_pickle

MAX_PICKLE_BYTES = 256 << 20
"""Largest ``data.pkl`` read. A real one has about 200 bytes a tensor."""
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_MAX_SAFETENSORS_HEADER = 100_000_000
_ZIP_DAMAGE = (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error, OverflowError, MemoryError)


# --- what kind of file is it ------------------------------------------------------------------------------------------


def sniff(path: str | os.PathLike[str]) -> str:
    """What the file is, by its first bytes and never by its name.

    One of ``zip``, ``legacy`` (torch.save before 1.6), ``tar`` (before 0.2), ``safetensors``, ``pickle``, ``lfs`` (a
    Git LFS pointer), ``html``, ``empty`` and ``unknown``. Raises CheckpointError if the file cannot be read.
    """
    head = _head(Path(path))
    magic = _LEGACY_MAGIC.to_bytes(10, "little")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if magic in head[:64] or str(_LEGACY_MAGIC).encode() in head[:64]:
        return "legacy"
    if head[257:262] == b"ustar":
        return "tar"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER:
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    if head.startswith(b"version https://git-lfs"):
        return "lfs"
    if head.lstrip()[:5].lower() in (b"<html", b"<!doc"):
        return "html"
    return "unknown" if head else "empty"


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the file: {error.strerror or error}") from error


def _refuse_kind(path: Path, kind: str) -> NoReturn:
    """Say what a file that is no torch zip is, and the way out."""
    name = command_name(path)
    resave = (
        f"""python -c "import torch; torch.save(torch.load('{name}', map_location='cpu', weights_only=True), """
        f"""'{name}')\""""
    )
    found = {
        "legacy": f"this is PyTorch's old format (before 1.6, not a zip). Re-save it: {resave}",
        "tar": f"this is a tar, PyTorch's oldest format (or another archive). Re-save it: {resave}",
        "safetensors": "this is a safetensors file, not a PyTorch file; rename it to end in .safetensors",
        "pickle": f"this is a bare pickle, which torch.save did not write. Re-save it with torch: {resave}",
        "lfs": "this is a Git LFS pointer, not the file itself; run `git lfs pull`",
        "html": "this is a web page, not a PyTorch file; download the file itself",
        "empty": "the file is empty; a PyTorch file (a zip by torch.save) was expected. Download it again",
    }.get(kind)
    if found is None:
        found = f"not a PyTorch file: a zip by torch.save was expected, and it starts with {_head(path)[:12]!r}"
    raise CheckpointError(f"{path}: {found}")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_torch(path: str | os.PathLike[str]) -> object:
    """What ``torch.save`` put into the file, with every tensor as a :class:`~openelm_mlx.rawtensor.RawTensor`.

    The result is made of dicts (an OrderedDict becomes one), lists, tuples, numbers, text, bytes, booleans and None; a
    dtype is its name, such as "torch.float32". Tensors stay in the file, however large it is, until their `read()`.
    Parts of the result may be shared or contain themselves, as in any pickle: do not walk it without a guard.

    Raises :class:`~openelm_mlx.errors.CheckpointError` if the file is anything but a zip by ``torch.save`` that holds
    data alone; nothing that the file names is ever run.
    """
    path = Path(path)
    kind = sniff(path)
    if kind != "zip":
        _refuse_kind(path, kind)
    try:
        with path.open("rb") as file:
            archive = _Archive(path, file)
            data = archive.read("data.pkl", MAX_PICKLE_BYTES)
            return load_pickle(path, data, lambda key: archive.locate(f"data/{key}"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the file: {error.strerror or error}") from error


def find_state_dict(obj: object, where: str | os.PathLike[str] = "checkpoint") -> tuple[dict[str, RawTensor], str]:
    """The model's tensors in what :func:`read_torch` returned, and the keys that lead to them ("" is the top).

    A dict of names to tensors is taken as it is; otherwise it is looked for under ``model_state_dict``,
    ``ema_state_dict``, ``state_dict``, ``model``, ``module`` and ``state``, in this order, up to three deep
    (``state.model``). A prefix that wrappers add to every name (``module.`` of DDP, ``_orig_mod.`` of torch.compile)
    is taken off. ``where`` is what messages call the file.

    Raises CheckpointError if there is no such dict (it lists the keys there are), or if it holds anything but tensors.
    """
    found = _search(obj, "", os.fspath(where))
    if found is None:
        top = f"its keys are {_listed(obj)}" if isinstance(obj, dict) else f"it is a {type(obj).__name__}"
        raise CheckpointError(
            f"{os.fspath(where)}: no state dict in it: {top}, but a dict of tensors was expected, at the top or under "
            f"{', '.join(_STATE_KEYS)}. Save the model's with torch.save(model.state_dict(), ...)"
        )
    tensors, keys = found
    return _strip_wrappers(tensors), keys


_STATE_KEYS = ("model_state_dict", "ema_state_dict", "state_dict", "model", "module", "state")
_WRAPPERS = ("module.", "_orig_mod.")


def _search(obj: object, keys: str, where: str) -> tuple[dict[str, RawTensor], str] | None:
    if not isinstance(obj, dict) or not obj:
        return None
    if keys.count(".") < 2:
        for key in _STATE_KEYS:
            found = _search(obj.get(key), f"{keys}.{key}".lstrip("."), where)
            if found is not None:
                return found
    tensors = {key: value for key, value in obj.items() if isinstance(key, str) and isinstance(value, RawTensor)}
    if not tensors:
        return None
    if len(tensors) < len(obj):
        others = {key: value for key, value in obj.items() if key not in tensors}
        raise CheckpointError(
            f"{where}: {keys or 'its top level'} has tensors, and also entries that are none: {_listed(others)}; a "
            "state dict of tensors alone was expected. Save the model's with torch.save(model.state_dict(), ...)"
        )
    return tensors, keys


def _listed(obj: dict[object, object]) -> str:
    """The first keys and their values' types; values are never shown, they may be endless."""
    shown = [f"{str(key)[:80]!a} ({type(value).__name__})" for key, value in list(obj.items())[:12]]
    return ", ".join(shown) + (f" and {len(obj) - 12} more" if len(obj) > 12 else "") if shown else "none"


def _strip_wrappers(tensors: dict[str, RawTensor]) -> dict[str, RawTensor]:
    while prefix := next((p for p in _WRAPPERS if all(name.startswith(p) for name in tensors)), None):
        tensors = {name[len(prefix) :]: tensor for name, tensor in tensors.items()}
    return tensors


# --- the zip ----------------------------------------------------------------------------------------------------------


class _Archive:
    """The entries of a torch zip, checked against the file; storages are located, never read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        try:
            with zipfile.ZipFile(file) as archive:
                infos, self._end = archive.infolist(), archive.start_dir
        except (*_ZIP_DAMAGE, OSError) as error:
            size = os.fstat(file.fileno()).st_size
            self.refuse(
                f"the zip's directory, which is at its end, is missing or damaged ({error}); the file has {size} "
                "bytes and is probably cut short. Download or copy it again"
            )
        self._infos = {info.orig_filename: info for info in infos}
        if len(self._infos) != len(infos):
            self.refuse("the zip has two entries of one name; torch.save writes no such file")
        self._bounds = sorted({info.header_offset for info in infos} | {self._end})
        self._located: dict[str, tuple[int, int]] = {}
        self.prefix = self._find_prefix()
        order = self.read("byteorder", 64) if f"{self.prefix}byteorder" in self._infos else b"little"
        if order.strip() != b"little":
            self.refuse(f"its byteorder is {order!r}; only little-endian files are read. Re-save it on such a machine")

    def refuse(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {message}")

    def _find_prefix(self) -> str:
        """The folder inside the zip, with its slash; it has the name that the file was saved under."""
        prefixes = [name[: -len("data.pkl")] for name in self._infos if name.endswith("/data.pkl")]
        if len(prefixes) != 1:
            found = ", ".join(sorted(ascii(name) for name in self._infos)[:5]) or "nothing"
            self.refuse(
                f"a zip, but not one by torch.save: it has {len(prefixes) or 'no'} entries '*/data.pkl' where one was "
                f"expected (found {found}). Give the .pt or .bin file itself; if this is an archive, unpack it"
            )
        prefix = prefixes[0]
        if any(name == f"{prefix}constants.pkl" or name.startswith(f"{prefix}code/") for name in self._infos):
            name = command_name(self.path)
            self.refuse(
                "a TorchScript archive, which is a program and not weights. If you trust it, save its weights: python "
                f"""-c "import torch; torch.save(torch.jit.load('{name}', map_location='cpu').state_dict(), """
                """'weights.pt')\""""
            )
        return prefix

    def locate(self, name: str) -> tuple[int, int]:
        """Absolute byte offset and length of an entry's data; refuses any that is not plain bytes inside the file."""
        if name not in self._located:
            self._located[name] = self._locate(f"{self.prefix}{name}")
        return self._located[name]

    def _locate(self, name: str) -> tuple[int, int]:
        info = self._infos.get(name)
        if info is None:
            self.refuse(f"the zip has no entry {name!a}, which its pickle refers to; the file is incomplete")
        if not 0 <= info.header_offset < self._end:
            self.refuse(f"the zip's entry {name!a} is not where its directory says; the file is damaged")
        if info.flag_bits & 0x41:
            self.refuse(f"the zip's entry {name!a} is encrypted; torch.save writes plain entries. Unpack and re-zip -0")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            self.refuse(
                f"the zip's entry {name!a} is compressed; torch.save stores its entries, and tensors are read in "
                "place. Unzip it and zip it again with `zip -0 -r`"
            )
        # The local header has its own name and extra lengths (torch pads with the latter), so it must be read.
        header = self._pread(info.header_offset, 30)
        signature, _, flags, method, *_, name_length, extra_length = struct.unpack("<4s5H3I2H", header)
        encoded = name.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        same_name = self._pread(info.header_offset + 30, name_length) == encoded
        if signature != b"PK\x03\x04" or method != zipfile.ZIP_STORED or flags & 0x41 or not same_name:
            self.refuse(f"the zip's entry {name!a} is not where its directory says; the file is damaged")
        offset = int(info.header_offset + 30 + name_length + extra_length)
        # The next entry's header (or the directory) is where this one's data must have ended.
        limit = self._bounds[bisect.bisect_right(self._bounds, info.header_offset)]
        if offset + info.file_size > limit:
            self.refuse(
                f"the zip's entry {name!a} claims {info.file_size} bytes, but {max(0, limit - offset)} are there; the "
                "file is damaged"
            )
        return offset, info.file_size

    def _pread(self, offset: int, length: int) -> bytes:
        data = os.pread(self._file.fileno(), length, offset)
        if len(data) != length:
            self.refuse("the file changed or was truncated while it was being read; copy or download it again")
        return data

    def read(self, name: str, limit: int) -> bytes:
        """An entry's bytes, if they are at most `limit`."""
        offset, size = self.locate(name)
        if size > limit:
            self.refuse(f"the zip's entry {name!a} has {size} bytes; at most {limit} were expected")
        return self._pread(offset, size)
