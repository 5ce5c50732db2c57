"""KV caches that attend where they lie, and the attention of prompts."""
