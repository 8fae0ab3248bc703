"""The simulator against published measurements: what it fits, what it predicts, and by how much it misses."""
