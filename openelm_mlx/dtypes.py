"""Names of dtypes, between people, safetensors files and MLX."""

from __future__ import annotations

import mlx.core as mx

from openelm_mlx.errors import OpenELMError

BY_NAME = {
    "bf16": mx.bfloat16,
    "bfloat16": mx.bfloat16,
    "fp16": mx.float16,
    "float16": mx.float16,
    "fp32": mx.float32,
    "float32": mx.float32,
}

SAFETENSORS = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
}


STORED = {name: dtype for dtype, name in SAFETENSORS.items()}
"""The same the other way round."""


def parse_dtype(dtype: str | mx.Dtype) -> mx.Dtype:
    """A floating dtype from its name (``bf16``, ``float32``, ...) or itself."""
    if isinstance(dtype, mx.Dtype):
        if dtype in (mx.bfloat16, mx.float16, mx.float32):
            return dtype
    elif dtype in BY_NAME:
        return BY_NAME[dtype]
    raise OpenELMError(f"dtype {dtype} cannot hold a model; use one of {', '.join(BY_NAME)}")


def dtype_name(dtype: mx.Dtype) -> str:
    """``float32`` and so on, as Hugging Face writes it."""
    return str(dtype).removeprefix("mlx.core.")


def precision_name(dtype: mx.Dtype) -> str:
    """A floating dtype as precisions are named: ``bf16``, ``fp16`` or ``fp32``."""
    return next(name for name, known in BY_NAME.items() if known == dtype)  # the short one comes first
