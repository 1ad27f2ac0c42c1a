"""What a person can see of a compilation: the logger, the pass report, graph dumps, the environment."""
