"""What makes MLX's CPU backend fast: a matrix product for few rows, and layers made for it, swapped in at load."""
