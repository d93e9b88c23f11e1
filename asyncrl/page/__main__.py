"""The page as a program: ``python -m asyncrl.page RUN_DIR``."""

import sys

from asyncrl.page.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
