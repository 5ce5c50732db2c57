"""Counters, progress, text and plots."""
