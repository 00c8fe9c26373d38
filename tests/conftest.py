"""Loads the package before anything can import MLX: the tests run on the BLAS that a user's program gets."""

import openelm_mlx

__all__ = ["openelm_mlx"]
