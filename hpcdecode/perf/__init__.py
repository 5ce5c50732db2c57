"""Cost model, calibration, planner, simulator, benchmarks."""
