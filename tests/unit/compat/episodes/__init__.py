"""Tests of functions of slime's shape as episodes."""
