"""``python -m ebbtide``: the command line without its console script."""

import sys

from ebbtide.cli import main

if __name__ == "__main__":
    sys.exit(main())
