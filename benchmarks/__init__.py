"""Measuring OpenELM."""
