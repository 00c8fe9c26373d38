"""Comparison with what Apple's PyTorch code computes: ``python -m tests.golden DIR``."""
