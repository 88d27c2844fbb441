"""Plans for hardware that is not present: stand-ins for data and devices, and cached reports."""
