"""torchfile on files made to lie, or to run something: each is refused, by name, and nothing runs."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from openelm_mlx.errors import CheckpointError
from openelm_mlx.rawtensor import RawTensor
from openelm_mlx.torchfile import find_state_dict, read_torch, sniff

DATA = Path(__file__).parent / "data" / "torch"

# --- files that are something else ------------------------------------------------------------------------------------


def lit(obj: object) -> bytes:
    """A pickle's opcodes for plain data, without its header and STOP."""
    return pickle.dumps(obj, 2)[2:-1]


def tensor(
    storage: str = "FloatStorage",
    key: object = "0",
    numel: object = 4,
    offset: object = 0,
    size: object = (2, 2),
    stride: object = (2, 1),
    rest: bytes = lit(False) + b"ccollections\nOrderedDict\n)R",
) -> bytes:
    """The opcodes for a tensor, any of them a lie."""
    pid = b"(" + lit("storage") + f"ctorch\n{storage}\n".encode() + lit(key) + lit("cpu") + lit(numel) + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + lit(offset) + lit(size) + lit(stride) + rest + b"tR"


def write_zip(path: Path, opcodes: bytes, entries: dict[str, bytes] | None = None, *, compression: int = 0) -> Path:
    """A torch zip around opcodes, with one storage of four floats."""
    files = {"data.pkl": b"\x80\x02" + opcodes + b".", "data/0": struct.pack("<4f", 1, 2, 3, 4), **(entries or {})}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(f"archive/{name}", data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_torch(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def test_the_bait_is_a_good_file(tmp_path: Path) -> None:
    read = read_torch(write_zip(tmp_path / "x.pt", tensor()))
    assert isinstance(read, RawTensor) and np.array(read.read()).tolist() == [[1, 2], [3, 4]]


def tar_bytes() -> bytes:
    return b"storages".ljust(257, b"\0") + b"ustar\x0000".ljust(255, b"\0")


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", "empty", "the file is empty"),
        (b"hello there, this is text", "unknown", "not a PyTorch file.*starts with b'hello there,'"),
        (struct.pack("<Q", 2) + b"{}", "safetensors", "a safetensors file"),
        (pickle.dumps({"a": 1}), "pickle", "a bare pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "lfs", "git lfs pull"),
        (b"\n<!DOCTYPE html>", "html", "a web page"),
        (tar_bytes(), "tar", "a tar"),
        ((DATA / "legacy.pt").read_bytes(), "legacy", r"old format.*torch\.save\(torch\.load\('.*weights_only=True"),
        (b"PK\x05\x06" + bytes(18), "zip", r"no entries '\*/data\.pkl'"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, kind: str, message: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    assert sniff(path) == kind
    with pytest.raises(CheckpointError, match=message):
        read_torch(path)


def test_a_path_that_a_shell_would_run_is_not_put_into_a_command(tmp_path: Path) -> None:
    path = tmp_path / "$(touch ran).pt"
    path.write_bytes((DATA / "legacy.pt").read_bytes())
    assert "torch.load('FILE'" in refused(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "cannot read the file: No such file" in refused(tmp_path / "none.pt")
    assert "cannot read the file: Is a directory" in refused(tmp_path)


def test_torchscript(tmp_path: Path) -> None:
    assert "TorchScript" in refused(write_zip(tmp_path / "x.pt", lit({}), {"constants.pkl": b"\x80\x02)."}))
    assert "TorchScript" in refused(write_zip(tmp_path / "x.pt", lit({}), {"code/__torch__.py": b""}))


def test_zips_that_torch_did_not_write(tmp_path: Path) -> None:
    assert "'archive/data.pkl' is compressed" in refused(
        write_zip(tmp_path / "x.pt", tensor(), compression=zipfile.ZIP_DEFLATED)
    )
    assert "byteorder is b'big'" in refused(write_zip(tmp_path / "x.pt", tensor(), {"byteorder": b"big"}))
    assert "2 entries" in refused(write_zip(tmp_path / "x.pt", tensor(), {"other/data.pkl": b""}))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"")
        archive.writestr("a/data.pkl", b"")
    assert "two entries of one name" in refused(tmp_path / "x.pt")


def patched(tmp_path: Path, name: str, at: int, value: bytes, *, central: bool) -> str:
    """What is said of a good file with bytes changed in an entry's local or central header."""
    path = write_zip(tmp_path / "x.pt", tensor())
    data = bytearray(path.read_bytes())
    found = data.rfind(name.encode()) - 46 if central else data.find(name.encode()) - 30
    assert bytes(data[found : found + 4]) == (b"PK\x01\x02" if central else b"PK\x03\x04")
    data[found + at : found + at + len(value)] = value
    path.write_bytes(data)
    return refused(path)


def test_headers_that_lie(tmp_path: Path) -> None:
    entry = "archive/data/0"
    assert "encrypted" in patched(tmp_path, entry, 8, b"\x01", central=True)
    assert "claims 1000000 bytes" in patched(tmp_path, entry, 20, struct.pack("<2I", 10**6, 10**6), central=True)
    assert "but its pickle says 4 elements" in patched(tmp_path, entry, 20, struct.pack("<2I", 8, 8), central=True)
    assert "compressed" in patched(tmp_path, entry, 24, struct.pack("<I", 10**6), central=True)
    assert "damaged" in patched(tmp_path, entry, 42, struct.pack("<I", 10**6), central=True)
    assert "damaged" in patched(tmp_path, entry, 0, b"XK", central=False)
    assert "damaged" in patched(tmp_path, entry, 8, b"\x08", central=False)
    assert "damaged" in patched(tmp_path, entry, 30, b"zzz", central=False)
    assert "claims 16 bytes" in patched(tmp_path, entry, 28, struct.pack("<H", 60), central=False)


def test_a_zip_cut_anywhere(tmp_path: Path) -> None:
    whole, path = (DATA / "training.pt").read_bytes(), tmp_path / "x.pt"
    for length in [*range(4, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "cut short" in refused(path)


# --- pickles that would run something, or lie -------------------------------------------------------------------------


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def code(sentinel: Path) -> str:
    return f"__import__('pathlib').Path({str(sentinel)!r}).touch()"


HOSTILE: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "os.system": ("posix.system", lambda s: lit(Calls(os.system, f"touch '{s}'"))),
    "os.system by name": ("os.system", lambda s: b"cos\nsystem\n" + lit((f"touch '{s}'",)) + b"R"),
    "eval": ("__builtin__.eval", lambda s: lit(Calls(eval, code(s)))),
    "eval, protocol 4": ("builtins.eval", lambda s: pickle.dumps(Calls(eval, code(s)), 4)[:-1]),
    "exec": ("__builtin__.exec", lambda s: lit(Calls(exec, code(s)))),
    "Popen": ("subprocess.Popen", lambda s: pickle.dumps(Calls(subprocess.Popen, ["touch", str(s)]), 4)[:-1]),
    "in a state dict": ("__builtin__.eval", lambda s: b"}" + lit("w") + lit(Calls(eval, code(s))) + b"s"),
    "as a tensor's hooks": ("__builtin__.eval", lambda s: tensor(rest=lit(False) + lit(Calls(eval, code(s))))),
    "as a tensor's size": ("__builtin__.eval", lambda s: tensor(size=Calls(eval, code(s)))),
    "getattr": ("__builtin__.getattr", lambda s: lit(Calls(getattr, "", "join"))),
    "attrgetter": ("operator.attrgetter", lambda s: b"coperator\nattrgetter\n" + lit(("system",)) + b"R"),
    "import": ("builtins.__import__", lambda s: b"cbuiltins\n__import__\n" + lit(("os",)) + b"R"),
    "a dotted name": (
        "collections.OrderedDict.__init__",
        lambda s: lit("collections") + lit("OrderedDict.__init__") + b"\x93",
    ),
    "a dotted module": ("collections OrderedDict.x", lambda s: lit("collections OrderedDict") + lit("x") + b"\x93"),
    "INST": ("os.system", lambda s: b"(" + lit(f"touch '{s}'") + b"ios\nsystem\n"),
    "an escaped name": (r"os\\x2esystem.x", lambda s: b"cos\\x2esystem\nx\n)R"),
    "INST of what is known": ("opcode INST", lambda s: b"(icollections\nOrderedDict\n"),
    "OBJ": ("os.system", lambda s: b"(cos\nsystem\n" + lit(f"touch '{s}'") + b"o"),
    "OBJ of what is known": ("opcode OBJ", lambda s: b"(ccollections\nOrderedDict\no"),
    "NEWOBJ": ("subprocess.Popen", lambda s: b"csubprocess\nPopen\n" + lit((["touch", str(s)],)) + b"\x81"),
    "NEWOBJ of what is known": ("opcode NEWOBJ", lambda s: b"ccollections\nOrderedDict\n)\x81"),
    "NEWOBJ_EX": ("opcode NEWOBJ_EX", lambda s: b"ccollections\nOrderedDict\n)}\x92"),
    "EXT1": ("opcode EXT1", lambda s: b"\x82\x01"),
    "EXT2": ("opcode EXT2", lambda s: b"\x83\x01\x00"),
    "EXT4": ("opcode EXT4", lambda s: b"\x84\x01\x00\x00\x00"),
    "BUILD on a function": ("sets the state", lambda s: b"ctorch\nSize\n" + lit({"call": 1}) + b"b"),
    "BUILD on a list": ("sets the state", lambda s: b"]}b"),
    "a call of text": ("calls what is no function", lambda s: lit("os.system") + b")R"),
    "a call of a dtype": ("calls what is no function", lambda s: b"ctorch\nfloat32\n)R"),
    "load_from_bytes": (
        "torch.storage._load_from_bytes",
        lambda s: b"ctorch.storage\n_load_from_bytes\n" + lit((pickle.dumps(Calls(eval, code(s))),)) + b"R",
    ),
    "a module object": ("torch.nn.modules.linear.Linear", lambda s: b"ctorch.nn.modules.linear\nLinear\n)\x81}b"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_code_is_refused_by_name_and_never_runs(tmp_path: Path, case: str) -> None:
    named, make = HOSTILE[case]
    sentinel = tmp_path / "ran"
    message = refused(write_zip(tmp_path / "x.pt", make(sentinel)))
    assert "refused: its pickle" in message and named in message and "If you trust the file" in message
    assert not sentinel.exists()


def test_the_sentinel_works(tmp_path: Path) -> None:
    pickle.loads(b"\x80\x02" + HOSTILE["eval"][1](tmp_path / "ran") + b".")
    assert (tmp_path / "ran").exists()


BIG = 1 << 61
LIES: dict[str, bytes] = {
    "rows beyond the storage": tensor(size=(3, 2)),
    "strides beyond the storage": tensor(stride=(3, 1)),
    "an offset beyond the storage": tensor(offset=1),
    "a negative offset": tensor(offset=-1),
    "a negative size": tensor(size=(-2, 2)),
    "a negative stride": tensor(stride=(-2, 1)),
    "huge integers": tensor(size=(BIG, BIG), stride=(BIG, BIG)),
    "integers beyond 64 bits": tensor(size=(1 << 5000, 1), stride=(0, 1)),
    "terabytes by stride 0": tensor(size=(1 << 20, 1 << 20), stride=(0, 0)),
    "an expanded row": tensor(size=(8, 4), stride=(0, 1)),
    "a float for a size": tensor(size=(2.0, 2)),
    "a bool for an offset": tensor(offset=False),
    "text for a size": tensor(size="22"),
    "a list for a size": tensor(size=[2, 2]),
    "sizes and strides of two lengths": tensor(stride=(1,)),
    "too many dimensions": tensor(size=(1,) * 33, stride=(1,) * 33),
    "too few arguments": b"ctorch._utils\n_rebuild_tensor_v2\n)R",
    "too many arguments": tensor(rest=b"NNNNN"),
    "no storage": b"ctorch._utils\n_rebuild_tensor_v2\n" + lit((1, 0, (1,), (1,), False, {})) + b"R",
    "a negated view": tensor(rest=lit(False) + b"}" + lit({"neg": True})),
    "a parameter of no tensor": b"ctorch._utils\n_rebuild_parameter\n" + lit(("x", True, {})) + b"R",
    "a Size of text": b"ctorch\nSize\n" + lit((("a",),)) + b"R",
    "an OrderedDict of a list": b"ccollections\nOrderedDict\n" + lit(([],)) + b"R",
    "bytes in another encoding": b"c_codecs\nencode\n" + lit(("x", "zip")) + b"R",
    "bytes of text beyond latin-1": b"c_codecs\nencode\n" + lit(("\u20ac", "latin1")) + b"R",
    "a storage larger than its entry": tensor(numel=5),
    "a storage smaller than its entry": tensor(numel=2),
    "a storage of a wider type": tensor("DoubleStorage"),
    "a storage of negative size": tensor(numel=-4),
    "a missing storage": tensor(key="1"),
    "a storage elsewhere": tensor(key="../data.pkl"),
    "a storage named by a number": tensor(key=0),
    "a reference that is no tuple": lit("storage") + b"Q",
    "a reference that is too short": lit(("storage",)) + b"Q",
    "a reference without a type": lit(("storage", "FloatStorage", "0", "cpu", 4)) + b"Q",
    "a reference to a module": lit(("module", None, "0", "cpu", 4)) + b"Q",
    "a bare storage": b"(" + lit("storage") + b"ctorch\nFloatStorage\n" + lit("0") + lit("cpu") + lit(4) + b"tQ",
    "a bare function": b"]ctorch\nSize\na",
    "a bare storage type": b"}" + lit("x") + b"ctorch\nFloatStorage\ns",
    "a reference of protocol 0": b"Pstorage\n",
    "text of protocol 0": b"S'\\q'\n",
    "an integer of protocol 0": b"I" + b"9" * 10_000 + b"\n",
    "a name that is cut": b"ccollections",
    "an integer of negative length": b"\x8b\xff\xff\xff\xff",
    "a set": b"\x8f",
    "no such memo": b"h\x07",
    "an empty stack": b"0",
    "a mark never opened": b"t",
    "a mark never closed": b"(]",
    "two objects": b"]]",
    "an odd number of items": b"}(" + lit("a") + b"u",
    "items of a list": b"](" + lit("a") + lit("b") + b"u",
    "an append to a dict": b"}" + lit("a") + b"a",
    "a key that is a tuple": b"}" + lit((1,)) + b"Ns",
    "a key that is a list": b"}]Ns",
    "a key that is endless": b"}" + lit("k" * 5000) + b"Ns",
    "text that is not UTF-8": b"X\x01\x00\x00\x00\xff",
    "text that is cut": b"X\xff\xff\xff\x7fabc",
    "bytes of 2^60": b"\x8e" + struct.pack("<Q", 1 << 60),
    "an unknown opcode": b"\xff",
    "names that are no text": b"K\x01K\x02\x93",
}


@pytest.mark.parametrize("case", LIES)
def test_a_pickle_that_lies(tmp_path: Path, case: str) -> None:
    refused(write_zip(tmp_path / "x.pt", LIES[case]))


def test_memory_stays_small(tmp_path: Path) -> None:
    """What makes a small pickle large: a memo index, copies of one text, and shared parts."""
    text = lit("x" * 100_000)
    bombs = [
        b"]r\xff\xff\xff\x7f",
        b"](" + (b"c_codecs\nencode\n" + text + b"q\x01" + lit("latin1") + b"\x86R")
        + b"c_codecs\nencode\nh\x01X\x06\x00\x00\x00latin1\x86R" * 1000 + b"e",
        b"N" + b"q\x00h\x00\x86" * 60,
        b"]" * 20_000 + b"a" * 19_999,
    ]  # fmt: skip
    tracemalloc.start()
    try:
        for opcodes in bombs:
            path = write_zip(tmp_path / "x.pt", opcodes)
            try:
                find_state_dict(read_torch(path))
            except CheckpointError as error:
                assert len(str(error)) < 2000
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_zip(tmp_path / "x.pt", tensor())
    monkeypatch.setattr("openelm_mlx.torchpickle.MAX_PICKLE_OPS", 10)
    assert "over 10 opcodes" in refused(path)
    monkeypatch.setattr("openelm_mlx.torchfile.MAX_PICKLE_BYTES", 10)
    assert "at most 10 were expected" in refused(path)
