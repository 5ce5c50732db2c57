"""What a job reports: counters, progress, tables, traces and plots."""
