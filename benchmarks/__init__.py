"""Ours against PyTorch and cuDNN, and the reports drawn from their results. README.md has the commands."""
