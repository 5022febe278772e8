"""A network to measure on, and the methods that are measured on it side by side."""
