"""Interfaces of other MoE libraries, on kodkod's layer."""
