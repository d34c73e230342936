"""Ends a build for a Python that is too old: the first that backend and setup.py import. Any Python 3 can read it."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036
    found = ".".join(map(str, sys.version_info[:3]))
    raise SystemExit("fastconv needs Python 3.10 or later; {} is Python {}".format(sys.executable, found))  # noqa: UP032
