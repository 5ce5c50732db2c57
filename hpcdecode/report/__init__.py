"""What a job reports: counters, progress, tables, traces, plots, and the page of a job."""
