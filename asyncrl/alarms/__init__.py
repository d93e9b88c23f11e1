"""Signs in the numbers of a run that something is wrong, as alarms in words.  Reads no files and starts nothing.

row of a step, numbers of its texts ──▶ watch: the rules, step by step ──▶ alarms ──▶ page, log
"""
