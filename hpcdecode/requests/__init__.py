"""The state of a generation: sampling parameters, prompt, sequence, prefix, beams, stop conditions."""
