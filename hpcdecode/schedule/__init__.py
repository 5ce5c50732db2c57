"""Prompts in, plans out: what each lane admits, prefills, decodes and frees. No I/O, no tensors."""
