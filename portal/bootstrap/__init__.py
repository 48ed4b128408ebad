"""Before Django exists: the virtual environment and the front end, made with the standard library alone."""
