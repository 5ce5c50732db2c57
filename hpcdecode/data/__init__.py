"""Reads prompt files and writes results, which are HDF5 files."""
