"""The same engine under virtual time."""
