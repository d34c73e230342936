"""The bench: ours against PyTorch and cuDNN, and the reports drawn from its result files.

Suites: `layer_suite` (`fastconv bench layers`). Result files: `results`. Tables and plots: `report`.
"""
