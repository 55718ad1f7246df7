"""`python -m draftwise`: the same as the command `draftwise`."""

import sys

from draftwise.cli import main

sys.exit(main())
