"""`python -m hpcdecode`."""

from hpcdecode.cli import main

raise SystemExit(main())
