"""Prompt files in, HDF5 results out."""
