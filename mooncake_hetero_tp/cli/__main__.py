"""`python -m mooncake_hetero_tp.cli` is `mooncake-hetero-tp`."""

import sys

from mooncake_hetero_tp.cli import main

sys.exit(main())
