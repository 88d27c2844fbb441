"""A small suite of measurements that needs no network and no data, for models of any size."""
