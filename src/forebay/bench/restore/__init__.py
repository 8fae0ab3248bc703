"""Cold restore of long contexts, compared: computing again, a baseline, a candidate, and a pool that is shared."""
