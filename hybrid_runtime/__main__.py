"""`python -m hybrid_runtime`."""

import sys

from hybrid_runtime.cli import main

sys.exit(main())
