"""Scheduling of groups: admission, choice of batches, staleness, and the ledger of all tokens."""
