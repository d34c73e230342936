"""Tables, plots and sentences of README and docs, drawn from the result files."""
