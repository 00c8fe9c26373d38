"""Loads the package before anything can import MLX: the tests run on the BLAS that a user's program gets.

No test has a time to be done in: the machine may be busy.
"""

import hypothesis

import openelm_mlx

__all__ = ["openelm_mlx"]

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
