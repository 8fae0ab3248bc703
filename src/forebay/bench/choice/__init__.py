"""Load or compute: the engine's decisions against the best there are, under virtual time."""
