"""Benchmark programs: `hpcdecode bench NAME`."""
