"""Live data: one watch stream per node in the collector, and one WebSocket per browser in web."""
