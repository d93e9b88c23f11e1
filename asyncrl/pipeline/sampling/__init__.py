"""One sample: its slot, its requests, its retries and its reward."""
