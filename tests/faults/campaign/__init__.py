"""Episodes of drawn faults against a whole engine of real processes, and a checker that reads its nodes' journals."""
