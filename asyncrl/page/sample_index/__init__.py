"""An index over the files of samples of a run, so that a million samples can be listed and filtered at once.

rollouts/step-N.parquet ──▶ step_files ──▶ index: a thread, newest steps first ──▶ DuckDB in memory ──▶ groups, versions
                                             │        ▲
                                             ▼        │
                                     page/samples-N.parquet: segments of 200 steps

Texts and tokens stay in the files of the steps, which ``step_files`` and ``text_search`` read when they are shown.
"""
