"""Run the command line as `python -m eventloop`."""

import sys

from eventloop.cli import main

if __name__ == "__main__":
    sys.exit(main())
