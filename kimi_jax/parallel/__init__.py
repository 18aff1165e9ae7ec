"""Meshes, the one table of logical axes, and what moves between devices."""
