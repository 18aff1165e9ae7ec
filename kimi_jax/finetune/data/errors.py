"""The error of training data."""


class DataError(ValueError):
    """Data that cannot be used, or a position in other data. Its text names the file and the line."""
