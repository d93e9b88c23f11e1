"""Tests of the simulation of faults."""
