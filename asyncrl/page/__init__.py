"""A page in the browser that shows runs, from the files in their run directories alone.

    asyncrl page RUN_DIR [RUN_DIR ...]

RUN_DIR ──▶ runs, sample_index, spans ──▶ tabs: one function each ──▶ templates ──▶ server ──▶ browser
"""
