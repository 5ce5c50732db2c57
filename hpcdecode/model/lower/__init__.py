"""Fuse and pack what was cut out for this CPU."""
