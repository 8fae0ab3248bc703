"""A trace through the real engine under virtual time: what tiers, media and policies would make of it."""
