"""What can be chosen for adapters. Imports nothing heavy, so that ``openelm adapter --help`` is quick."""

FORMS = ("peft", "mlx-lm")
"""Programs that adapters are written for."""
