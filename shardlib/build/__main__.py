"""`python -m shardlib.build [host|cuda|all]`: compile shardlib's own kernels now."""

import sys

from shardlib.build.library import command

if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
