"""Prompt files in, token ids between, HDF5 out."""
