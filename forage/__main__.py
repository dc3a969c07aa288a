"""``python -m forage``: the same command line as ``forage``."""

import sys

from forage.commands.cli import main

sys.exit(main())
