"""What executes: the slices of a loaded model."""
