"""Tensors between S-ranks and R-ranks."""
