"""`python -m benchmarks`: the same as `fastconv bench`, with the fastconv that Python finds here."""

from benchmarks.cli import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
