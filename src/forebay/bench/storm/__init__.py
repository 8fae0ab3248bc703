"""The restore storm: many sessions wanted back at once, served in order against sharing the device evenly."""
