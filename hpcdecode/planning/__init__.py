"""Cost model, calibration, simulator and planner."""
