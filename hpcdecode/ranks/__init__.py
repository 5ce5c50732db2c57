"""The ranks of a job: their roles, and how they start, are watched and end."""
