"""`python -m ithaca`, for launchers that start modules."""

from .cli.main import main

raise SystemExit(main())
