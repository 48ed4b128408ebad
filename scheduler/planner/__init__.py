"""Pipeline plans from a layer profile: stages, replicas and predicted time on a topology. Pure."""
