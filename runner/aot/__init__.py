"""Plans for absent hardware: stand-ins for data and devices, and cached reports."""
