"""Plain MPI helpers: waiting, typed messages, fault tolerance, GPU memory."""
