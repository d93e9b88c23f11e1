"""The statistics of answers to held-out prompts."""
