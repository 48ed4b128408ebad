"""PostgreSQL through Django's own backend, with a time limit on every wait and pooled connections."""
