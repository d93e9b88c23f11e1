"""Metrics: facts, rows, files and views.  Pipeline stages import only the facts they offer and the timeline."""
