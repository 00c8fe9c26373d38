"""PyTorch checkpoints of OpenELM to MLX folders."""
