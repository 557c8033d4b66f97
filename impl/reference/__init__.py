"""The reference engine: a hybrid prefix cache done right, small enough to read. Start with ``engine.py``."""
