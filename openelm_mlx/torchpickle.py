"""The pickle inside a PyTorch file, read as data.

A pickle is a program. :class:`_Machine` runs the few opcodes that data needs and no others, and a name in the pickle
selects one of *our* functions (``_FUNCTIONS``); nothing is imported or looked up by a file's wish. It does not build on
``pickle.Unpickler``, because that one also honours the extension registry, lets a ten-byte file reserve gigabytes
through a memo index, calls methods of what is on its stack, and hashes any key (a nested tuple that shares its parts
takes exponential time). Work and memory here are bounded by the size of the pickle.

Only ``torchfile`` uses this module.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from openelm_mlx.errors import CheckpointError
from openelm_mlx.pickleops import opcodes
from openelm_mlx.rawtensor import ITEMSIZE, RawTensor

MAX_PICKLE_OPS = 4_000_000
"""Most opcodes run: a one-byte opcode can make a 64-byte dict. A real file has about 50 a tensor."""
_MAX_DIMS = 32
_MAX_KEY = 4096
_DAMAGE = (
    *(ValueError, IndexError, KeyError, TypeError, AttributeError, EOFError, OverflowError, AssertionError),
    *(struct.error, RecursionError, MemoryError),
)


def load_pickle(path: Path, data: bytes, locate: Callable[[str], tuple[int, int]]) -> object:
    """The object that a ``data.pkl`` describes, its tensors as RawTensor.

    ``path`` is the file that tensors lie in and messages name; ``locate`` gives the absolute byte offset and length of
    the storage with a key, or raises. Raises CheckpointError for anything but data.
    """
    try:
        result = _Machine(path, locate).run(data)
    except _DAMAGE as error:
        reason = str(error)[:300] if type(error) is ValueError else f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(
            f"{path}: its pickle is damaged or holds no plain data ({reason}); copy or download the file again, or "
            "re-save its state dict with torch.save"
        ) from error
    _check_plain(path, result)
    return result


def command_name(path: Path) -> str:
    """The path for a command that people will paste; a name that a shell would interpret is left out."""
    return str(path) if re.fullmatch(r"[\w@%+=:,./~-][\w@%+=:,./ ~-]*", str(path)) else "FILE"


def _check_plain(path: Path, root: object) -> None:
    """Refuse a result that holds building parts. Each object is visited once, so shared parts cost nothing."""
    pending, seen = [root], set[int]()
    while pending:
        item = pending.pop()
        if isinstance(item, _Part):
            raise CheckpointError(
                f"{path}: holds {item.describe()} that belongs to no tensor; save tensors, with torch.save(state_dict)"
            )
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            pending.extend(item.values() if isinstance(item, dict) else item)


# --- what a pickle may name -------------------------------------------------------------------------------------------


class _Part:
    """Something that helps to build a tensor and is no data by itself; none may remain in the result."""

    def describe(self) -> str:
        return "a storage"


@dataclass(frozen=True)
class _StorageType(_Part):
    dtype: str


@dataclass(frozen=True)
class _Storage(_Part):
    offset: int
    dtype: str
    numel: int


@dataclass(frozen=True)
class _Function(_Part):
    """One of ours, chosen by a name in the pickle; it checks its arguments, of which nothing is known."""

    name: str
    call: Callable[[_Machine, tuple[Any, ...]], object]

    def describe(self) -> str:
        return f"the function {self.name}"


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_dims(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= _MAX_DIMS and all(_is_index(n) for n in value)


def _rebuild_tensor(machine: _Machine, args: tuple[Any, ...]) -> RawTensor:
    """(storage, offset, size, stride[, requires_grad, hooks[, metadata]]): v1 has the first four, v2 the rest."""
    if len(args) not in (4, 6, 7) or not isinstance(args[0], _Storage):
        raise ValueError("a tensor is built from unexpected arguments")
    storage, offset, size, stride = args[:4]
    if not (_is_index(offset) and _is_dims(size) and _is_dims(stride) and len(size) == len(stride)):
        raise ValueError("a tensor has a negative or impossible offset, size or stride")
    if len(args) == 7 and args[6]:
        machine.refuse("a tensor is a conjugate or negated view; re-save the file with `tensor.resolve_neg()`")
    path = machine.path
    tensor = RawTensor(path, storage.offset + offset * ITEMSIZE[storage.dtype], storage.dtype, size, stride)
    if offset + tensor.span // tensor.itemsize > storage.numel:
        machine.refuse(
            f"a tensor of shape {size}, offset {offset} and strides {stride} reaches outside its storage of "
            f"{storage.numel} elements; the file is damaged"
        )
    if tensor.size > storage.numel:
        # A few bytes could otherwise stand for terabytes.
        machine.refuse(
            f"a tensor of shape {size} is an expanded view of {storage.numel} elements; re-save the file with "
            "`tensor.contiguous()`"
        )
    if tensor.size == 0 or _is_row_major(size, stride):
        return RawTensor(path, tensor.offset, tensor.dtype, size)
    return tensor


def _is_row_major(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def _rebuild_parameter(machine: _Machine, args: tuple[Any, ...]) -> RawTensor:
    """(tensor, requires_grad, hooks[, state]); only the tensor matters."""
    if len(args) not in (3, 4) or not isinstance(args[0], RawTensor):
        raise ValueError("a parameter is built from unexpected arguments")
    return args[0]


def _ordered_dict(machine: _Machine, args: tuple[Any, ...]) -> dict[object, object]:
    if args:
        raise ValueError("an OrderedDict is built from unexpected arguments")
    return {}


def _size(machine: _Machine, args: tuple[Any, ...]) -> tuple[int, ...]:
    if len(args) != 1 or not _is_dims(args[0]):
        raise ValueError("a torch.Size is built from unexpected arguments")
    return args[0]


def _encode(machine: _Machine, args: tuple[Any, ...]) -> bytes:
    """How protocol 2, torch's default, writes bytes: as a str of the same code points."""
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise ValueError("bytes are built from unexpected arguments")
    machine.spend(len(args[0]))
    return args[0].encode("latin-1")


_FUNCTIONS: dict[tuple[str, str], Callable[[_Machine, tuple[Any, ...]], object]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch", "Size"): _size,
    ("_codecs", "encode"): _encode,
}
_STORAGES = {
    "Double": "F64",
    "Float": "F32",
    "Half": "F16",
    "BFloat16": "BF16",
    "Bool": "BOOL",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
}
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_GLOBALS: dict[tuple[str, str], object] = {
    **{key: _Function(".".join(key), call) for key, call in _FUNCTIONS.items()},
    **{("torch", f"{name}Storage"): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", name): f"torch.{name}" for name in _DTYPES},
}


# --- the pickle -------------------------------------------------------------------------------------------------------

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = ("PROTO", "FRAME", "STOP")  # the stream of opcodes ends at STOP by itself


class _Machine:
    """Runs the opcodes of protocols 2 to 5 that make dicts, lists, tuples, numbers, text and tensors."""

    def __init__(self, path: Path, locate: Callable[[str], tuple[int, int]]) -> None:
        self.path = path
        self._locate = locate
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each MARK
        self._memo: dict[int, Any] = {}
        self._budget = 0

    def refuse(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {message}")

    def refuse_code(self, what: str) -> NoReturn:
        name = command_name(self.path)
        self.refuse(
            f"refused: its pickle {what}, which is code and not data; only tensors, dicts, lists, numbers and text are "
            "read. If you trust the file, re-save its state dict (this runs the file's code): python -c \"import "
            f"torch; o = torch.load('{name}', map_location='cpu', weights_only=False); torch.save(o.state_dict() if "
            "hasattr(o, 'state_dict') else o['model_state_dict'], 'weights.pt')\""
        )

    def spend(self, nbytes: int) -> None:
        """Refuse what copies one memoized string again and again."""
        self._budget -= nbytes
        if self._budget < 0:
            raise ValueError("its bytes are larger than the pickle")

    def run(self, data: bytes) -> object:
        """The object that the pickle describes."""
        self._budget = len(data)
        for count, (name, arg) in enumerate(opcodes(data, _KNOWN)):
            if count >= MAX_PICKLE_OPS:
                self.refuse(f"its pickle has over {MAX_PICKLE_OPS} opcodes; no model's has")
            if name in _NUMBERS or name in _TEXTS:
                self._stack.append(arg)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                self._fold(_TUPLES[name])
            elif name not in _IGNORED:
                if name not in _OPCODES:
                    self._refuse_opcode(name)
                _OPCODES[name](self, arg)
        if len(self._stack) != 1 or self._below:
            raise ValueError("it ends in the middle")
        return self._stack[0]

    def _refuse_opcode(self, name: str) -> NoReturn:
        if name.startswith(("INST", "OBJ", "NEWOBJ", "EXT")):
            self.refuse_code(f"uses the opcode {name}")
        raise ValueError(f"it uses the opcode {name}, which torch.save does not")

    def _fold(self, count: int) -> None:
        if len(self._stack) < count:
            raise ValueError("too few items for a tuple")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _tuple(self, _: Any) -> None:
        items = self._pop_mark()  # first: it replaces the stack
        self._stack.append(tuple(items))

    def _append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to what is no list")
        target.extend(items)

    def _setitem(self, _: Any) -> None:
        value = self._stack.pop()
        self._update([self._stack.pop(), value])

    def _setitems(self, _: Any) -> None:
        self._update(self._pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Keys that are hashed and compared in no time, whatever the file says.
            if not (type(key) is int and key.bit_length() < 64) and not (isinstance(key, str) and len(key) <= _MAX_KEY):
                raise ValueError("a dict has a key that is neither a short text nor an integer")
            target[key] = value

    def _put(self, index: Any) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, index: Any) -> None:
        self._stack.append(self._memo[index])

    def _global(self, arg: tuple[str, str]) -> None:
        self._push_global(*arg)

    def _inst(self, arg: tuple[str, str]) -> None:
        self._global(arg)  # refuses it by name, if it is a name to refuse
        self._refuse_opcode("INST")

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("it names a global by what is no text")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        if (module, name) not in _GLOBALS:
            self.refuse_code(f"names {f'{module}.{name}'[:200]!a}")
        self._stack.append(_GLOBALS[module, name])

    def _reduce(self, _: Any) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Function) or not isinstance(args, tuple):
            self.refuse_code("calls what is no function")
        try:
            self._stack.append(function.call(self, args))
        except ValueError as error:
            raise ValueError(f"{function.name}: {error}") from error

    def _build(self, _: Any) -> None:
        """A state dict's attributes, such as ``_metadata``; they say nothing about the weights."""
        state = self._stack.pop()
        if type(self._stack[-1]) is not dict or not isinstance(state, dict):
            self.refuse_code("sets the state of an object")

    def _persistent(self, _: Any) -> None:
        """("storage", type, key, device, number of elements)"""
        pid = self._stack.pop()
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _StorageType)):
            raise ValueError("a reference to a storage has an unexpected form")
        _, kind, key, _, numel = pid
        if not isinstance(key, str) or len(key) > _MAX_KEY or not _is_index(numel):
            raise ValueError("a reference to a storage has an unexpected form")
        offset, nbytes = self._locate(key)
        if not 0 <= nbytes - numel * ITEMSIZE[kind.dtype] < ITEMSIZE[kind.dtype]:
            self.refuse(
                f"storage {key!a} has {nbytes} bytes, but its pickle says {numel} elements of {kind.dtype}; the file "
                "is damaged"
            )
        self._stack.append(_Storage(offset, kind.dtype, numel))


_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "EMPTY_LIST": _Machine._empty_list,
    "EMPTY_DICT": _Machine._empty_dict,
    "TUPLE": _Machine._tuple,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "SETITEM": _Machine._setitem,
    "SETITEMS": _Machine._setitems,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._memoize,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "GLOBAL": _Machine._global,
    "INST": _Machine._inst,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent,
}
_KNOWN = frozenset((*_NUMBERS, *_TEXTS, *_CONSTANTS, *_TUPLES, *_IGNORED, *_OPCODES))
