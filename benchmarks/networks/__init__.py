"""Whole networks: swapped and fused against every form of PyTorch."""
