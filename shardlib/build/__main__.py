"""`python -m shardlib.build [host|cuda|all]`: compile shardlib's own kernels now."""

import sys

from shardlib.build.library import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
