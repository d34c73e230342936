"""Whole training steps: swapped against PyTorch, eager and compiled."""
