"""One algorithm, looked into."""
