"""How a request is looked at: its records on each engine, its timeline over several, its spans."""
