"""Writes, resumes, merges, reads and exports results files."""
