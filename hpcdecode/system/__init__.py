"""What Linux, Slurm and the CPU say: control groups, cores, memory, signals, files, processes."""
