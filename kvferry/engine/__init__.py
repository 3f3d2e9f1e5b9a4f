"""The reference engine: a paged model, a scheduler, workers and executors."""
