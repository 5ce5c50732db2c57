"""Read checkpoints of quantised weights: what states the scheme, the formats, and the weights by their plain keys."""
