"""Cold restore of long contexts, compared: computing again, a baseline medium, a candidate, and a pool that is shared."""
