"""KV caches, which compute attention where they lie, and the attention of prompts."""
