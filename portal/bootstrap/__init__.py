"""Before Django exists: creates the virtual environment and the front end with the standard library only."""
