"""Trackers: services such as Weights & Biases that receive each row of metrics.

    event loop ──row──▶ TrackerSink: bounded queue ──▶ thread ──▶ TrackerProcess ──pipe──▶ program ──▶ wandb, trackio

A tracker can neither delay nor end a run: its library runs in a separate process, and every call has a deadline.
"""
