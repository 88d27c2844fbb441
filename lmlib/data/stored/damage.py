"""What reading stored data raises."""


class DamagedDataError(ValueError):
    """Stored data is missing, truncated or fails its checksum."""
