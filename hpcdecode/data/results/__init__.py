"""Results files: written, resumed, merged, read and exported."""
