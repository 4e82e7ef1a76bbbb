"""Measures this library against its peers; `make bench` runs it."""
