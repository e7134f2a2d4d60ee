"""`python -m pdkv.bench`: the same as `pdkv bench`; the consumer starts its producer this way."""

import sys

from pdkv.bench.cli import main

sys.exit(main(sys.argv[1:]))
