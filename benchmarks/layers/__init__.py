"""Single layers: the suite `layers`, its sets, sweeps."""
