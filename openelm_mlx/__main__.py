"""``python -m openelm_mlx``: the command line without its script."""

from openelm_mlx.cli import main

main()
