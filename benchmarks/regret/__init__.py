"""Regret: the time of what `auto` takes over that of the best of all our algorithms and PyTorch's, in one run."""
