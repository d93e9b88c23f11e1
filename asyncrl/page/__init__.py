"""A page in the browser that shows runs, from the files in their run directories alone.

    asyncrl page RUN_DIR [RUN_DIR ...]

RUN_DIR ──▶ run_files ──▶ rows, sample_index, timeline ──▶ views: one function per tab ──▶ server ──▶ browser
"""
