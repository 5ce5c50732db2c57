"""`hpcdecode serve`: rows come over HTTP, in the forms of the OpenAI API."""
