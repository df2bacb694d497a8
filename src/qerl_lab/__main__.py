"""`python -m qerl_lab`: see `qerl_lab.cli`."""

import sys

from qerl_lab.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
