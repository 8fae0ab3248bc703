"""`forebay bench io`: the file tier against plain controls on the same device, in one interleaved run."""
