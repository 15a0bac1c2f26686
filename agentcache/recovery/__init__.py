"""Recovery policies and the planner: pure functions over small arrays."""
