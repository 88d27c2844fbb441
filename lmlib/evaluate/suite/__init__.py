"""A small suite of measurements for models of any size; it needs no network and no data."""
