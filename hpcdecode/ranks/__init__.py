"""Which rank plays which role, and how a world starts, is watched and ends."""
