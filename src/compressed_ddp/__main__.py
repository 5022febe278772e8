"""``python -m compressed_ddp`` is ``compressed-ddp``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
