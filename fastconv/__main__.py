"""`python -m fastconv`: the same as the command `fastconv`."""

from fastconv.cli import main

if __name__ == "__main__":
    main()
