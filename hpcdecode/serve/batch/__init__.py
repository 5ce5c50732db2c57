"""Batches of the OpenAI API: jobs over a server's live desk."""
