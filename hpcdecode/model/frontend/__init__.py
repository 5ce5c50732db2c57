"""Trace a Hugging Face decoder and cut it at every attention."""
