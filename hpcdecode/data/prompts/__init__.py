"""Prompt files to token ids."""
