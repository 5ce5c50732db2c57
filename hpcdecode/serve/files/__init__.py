"""Files that clients upload, and that batches write."""
